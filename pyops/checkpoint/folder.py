"""Checkpoints on the disk: one folder each, whole or not there, and the newest few of a run.

run/checkpoints/ step-00000100/       shared.safetensors, shards-00000.safetensors,
                                      own-00000.safetensors, ..., manifest.json
                 step-00000200/
                 step-00000300.tmp/   being written, or left by a process that was killed
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pyops.checkpoint.background import BackgroundSaver
from pyops.checkpoint.format.manifest import MANIFEST
from pyops.checkpoint.writing import commit, discard, prepare, write
from pyops.comm.agreement import agree, gather

__all__ = ["Checkpoints", "save"]


def save(
    folder: Path | str, state: Any, *, own: Any = None, group: dist.ProcessGroup | None = None
) -> None:
    """Write `state` (rank 0's, and every rank's shards) and each rank's `own` to `folder`. A
    checkpoint that is there is replaced when all is on the disk; a folder with anything else in it
    is refused (as `pyops.hub.save` does it).

    Args:
        state, own: Nested dicts, lists and tuples of tensors, numbers, strings, booleans and None.
            Anywhere in `state`, ranks may hold a `pyops.flat.Shard` or `Shards` of one tensor at
            one path, also where rank 0 has none: together they must cover the tensor, once, or
            CheckpointError names the path before anything is written.

    Raises:
        CheckpointError: On all ranks alike when it can't be written, a full disk for one; what was
            in `folder` before is still whole then.
        TypeError: For a state that a checkpoint can't hold, before anything is written.
    """
    plan = prepare(folder, state, own=own, group=group)
    error: Exception | None = None
    entry = None
    try:
        entry = write(plan)
    except Exception as caught:  # whatever it is: the other ranks wait to be told
        error = caught
    told = gather((error is not None, entry), group=group)
    try:
        if any(failed for failed, _ in told):
            agree(error, group=group)
        if plan.rank == 0:
            try:
                commit(plan, [each for _, each in told if each is not None])
            except Exception as caught:
                error = caught
        agree(error, group=group)
    finally:
        discard(plan)


class Checkpoints:
    """The checkpoints of one run, `folder`/step-00000100 and so on; only the newest `keep` stay.

    Args:
        background: `save` copies the state, and it is written while training goes on
            (`pyops.checkpoint.BackgroundSaver`); call `wait()` at the end.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        keep: int = 2,
        background: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay: give 1 or more")
        self.folder, self.keep, self._group = Path(folder), keep, group
        self._saver = BackgroundSaver(group=group) if background else None

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08}"

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, oldest first."""
        found = (
            p.name.removeprefix("step-").removesuffix(".old")
            for p in self.folder.glob("step-*")
            if (p / MANIFEST).exists()
        )
        return sorted({int(name) for name in found if name.isdigit()})

    def save(
        self, step: int, state: Any, *, own: Any = None, group: dist.ProcessGroup | None = None
    ) -> Path:
        """`pyops.checkpoint.save`, then remove the oldest beyond `keep`; the path of the new one,
        which in the background is there later.

        Args:
            group: None takes the one that the Checkpoints were given.
        """
        if self._saver is not None:
            self._saver.save(self.path(step), state, own=own, then=self._prune)
            return self.path(step)
        group = group if group is not None else self._group
        save(self.path(step), state, own=own, group=group)
        if not dist.is_initialized() or dist.get_rank(group) == 0:
            self._prune()
        return self.path(step)

    def wait(self) -> None:
        """Return when all that was saved is on the disk.

        Raises:
            CheckpointError: On all ranks alike, if it can't be.
        """
        if self._saver is not None:
            self._saver.wait()

    def close(self) -> None:
        """Of this rank alone, at the end, also after an error: let a save in the background end, if
        it does so soon."""
        if self._saver is not None:
            self._saver.close()

    def _prune(self) -> None:
        for old in self.steps()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        for left in self.folder.glob(
            "step-*.tmp"
        ):  # by a process that was killed; nothing is being written now
            shutil.rmtree(left, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None
