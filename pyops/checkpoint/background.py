"""Saving while training goes on: the state is copied, and a thread writes the copy.

    training ...| save: agree, copy | step | step | step | save: wait for the last, agree, copy |
    rank 0                          | write own files | others done?  manifest, rename |
    rank r                          | write own files, done-r.json |

The threads don't communicate: collectives of theirs could meet those of training in another order
on another rank. Each leaves a note beside its files, and rank 0's reads the notes. What went wrong
is raised by the next `save` or `wait`, on all ranks alike.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.checkpoint.format.tensor_file import Content
from pyops.checkpoint.writing import Plan, commit, discard, prepare, refusal, write
from pyops.comm.agreement import agree
from pyops.host_memory import paged_empty, pinned_empty

__all__ = ["BackgroundSaver"]

LOOK_EVERY = 0.02  # seconds between two looks for the others' notes
GRACE = 10.0  # seconds for the others' notes once this process is at its end
ALIGNMENT = 64  # bytes


class _Copies:
    """Host memory that a state is copied into, kept for the next one: fresh memory costs more than
    the copy."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, plan: Plan) -> None:
        """Put copies into the plan in place of its tensors."""
        places, end = [], 0
        for tensors in plan.files.values():
            for name, tensor in tensors.items():
                places.append((tensors, name, tensor, end))
                end += -(-_nbytes(tensor) // ALIGNMENT) * ALIGNMENT
        on_cuda = any(isinstance(tensor, Tensor) and tensor.is_cuda for _, _, tensor, _ in places)
        if len(self._buffer) < end or (on_cuda and not self._buffer.is_pinned()):
            self.release()
            self._buffer = pinned_empty(end) if on_cuda else paged_empty(end)
        for tensors, name, content, start in places:
            flat = self._buffer[start : start + _nbytes(content)]
            copy = flat.view(content.dtype).view(tuple(content.shape))
            tensor = content if isinstance(content, Tensor) else content.read()
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                # One thread moves 10 GB/s; torch's threads, beside those of other ranks on the same
                # cores, a tenth of it.
                np.copyto(flat.numpy(), tensor.detach().reshape(-1).view(torch.uint8).numpy())
            else:
                copy.copy_(tensor.detach(), non_blocking=True)
            tensors[name] = copy
        for device in {
            tensor.device
            for _, _, tensor, _ in places
            if isinstance(tensor, Tensor) and tensor.is_cuda
        }:
            torch.cuda.synchronize(device)

    def release(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")


def _nbytes(content: Content) -> int:
    return prod(content.shape) * content.dtype.itemsize


class _Save:
    """One save under way: the thread of this rank and what it tells."""

    def __init__(
        self, plan: Plan, *, size: int, timeout: float, then: Callable[[], None] | None
    ) -> None:
        self._plan, self._size, self._timeout, self._then = plan, size, timeout, then
        self.written, self._given_up = threading.Event(), threading.Event()
        self.write_error: Exception | None = None
        self.commit_error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=f"checkpoint {plan.folder.name}")
        self.thread.start()

    def give_up(self) -> None:
        """Rank 0: don't wait for the others' notes any longer."""
        self._given_up.set()

    def _run(self) -> None:
        entry: dict[str, Any] = {}
        try:
            entry = write(self._plan)
            if self._plan.rank:
                _leave(self._note(self._plan.rank), entry)
        except Exception as error:
            self.write_error = (
                refusal(self._plan.folder, error) if isinstance(error, OSError) else error
            )
        self.written.set()
        if self._plan.rank == 0:
            try:
                if self.write_error is None:
                    self._commit(entry)
            except Exception as error:
                self.commit_error = (
                    refusal(self._plan.folder, error) if isinstance(error, OSError) else error
                )
            finally:
                discard(self._plan)

    def _note(self, rank: int) -> Path:
        return self._plan.aside / f"done-{rank:05}.json"

    def _commit(self, entry: dict[str, Any]) -> None:
        entries, missing = [entry], list(range(1, self._size))
        deadline = time.monotonic() + self._timeout
        ending = False
        while missing:
            if self._note(missing[0]).exists():
                entries.append(json.loads(self._note(missing[0]).read_text()))
                self._note(missing.pop(0)).unlink()
                continue
            if not ending and not threading.main_thread().is_alive():
                ending, deadline = True, min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"checkpoint {self._plan.folder} can't be written: no word of the "
                    f"files of ranks {missing[:8]}; look for "
                    "why they stopped. Checkpoints from before are untouched"
                )
            if self._given_up.wait(LOOK_EVERY):
                return
        commit(self._plan, entries)
        if self._then is not None:
            self._then()


def _leave(path: Path, entry: dict[str, Any]) -> None:
    """Write a note that is whole or not there."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(entry))
    os.rename(aside, path)


class BackgroundSaver:
    """Saves one checkpoint at a time in the background: `save` returns when the state has been
    copied to host memory.

    The copy stays allocated for the next save until `release()`.

    Call `wait()` before the process ends, else a last error is not seen. A process that ends
    finishes its part of a save first; one that is killed leaves the checkpoint that was there
    before, whole.

    Args:
        group: The ranks that save together.
        timeout: Seconds that rank 0 waits for the others' files once its own are written.
    """

    def __init__(self, *, group: dist.ProcessGroup | None = None, timeout: float = 600.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}; it must be more than 0 seconds")
        self._group, self._timeout = group, timeout
        self._copies = _Copies()
        self._under_way: _Save | None = None

    def save(
        self,
        folder: Path | str,
        state: Any,
        *,
        own: Any = None,
        then: Callable[[], None] | None = None,
    ) -> None:
        """As `pyops.checkpoint.save`, but written in the background; waits for a save that is under
        way. A collective.

        Raises, on all ranks alike, what the save before met with, a full disk for one, and then
        does not begin this one.

        Args:
            then: Called on rank 0, in the background, once the checkpoint is in its place.
        """
        self.wait()
        plan = prepare(folder, state, own=own, group=self._group)
        error: Exception | None = None
        try:
            self._copies.take(plan)
        except RuntimeError as caught:  # too little memory
            error = CheckpointError(
                f"checkpoint {folder} can't be copied to be written in the background: {caught}"
            )
        try:
            agree(error, group=self._group)
        except Exception:
            discard(plan)
            raise
        size = dist.get_world_size(self._group) if dist.is_initialized() else 1
        self._under_way = _Save(plan, size=size, timeout=self._timeout, then=then)

    @property
    def busy(self) -> bool:
        """Whether this rank's part of a save is under way."""
        return self._under_way is not None and self._under_way.thread.is_alive()

    def wait(self) -> None:
        """Return when the save that is under way, if any, is on the disk; else raise, on all ranks
        alike. A collective."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        under_way.written.wait()
        try:
            agree(under_way.write_error, group=self._group)
        except BaseException:
            under_way.give_up()  # a rank that failed leaves no note
            under_way.thread.join()
            raise
        under_way.thread.join()
        agree(under_way.commit_error, group=self._group)

    def close(self) -> None:
        """Of this rank alone, before it leaves because of an error: let a save under way end, if it
        does so soon."""
        if self._under_way is not None:
            self._under_way.thread.join(GRACE)
            self._under_way.give_up()
            self._under_way.thread.join()

    def release(self) -> None:
        """Free the host memory of the copy, once nothing is under way."""
        self.wait()
        self._copies.release()
