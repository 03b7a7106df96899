"""ActivationCache: what frozen layers say to each sample, in one piece of memory that all processes
of a host share.

    tags     | depth + 1, seed | 0, 0 | depth + 1, seed | ...   0: nothing there
    values   | sample 0        |      | sample 2        | ...   as many samples as the budget allows

The memory has no name: rank 0 makes it, the others open it through /proc, and it is gone when the
last process is, however that ended. A sample's values are valid for the (depth, augmentation seed)
of its tag alone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import agree, gather
from pyops.elastic.frozen.disk_tier import DiskTier, page_multiple
from pyops.host_memory import free_memory

__all__ = ["ActivationCache", "open_cache"]

logger = logging.getLogger("pyops")

HEADER = 4096  # bytes; begins with a token that says whose memory it is


class NoRoom(ValueError):
    """A budget below one sample."""


class ActivationCache:
    """Activations of `samples` samples, each of `shape` and `dtype`, keyed by (sample, depth,
    seed).

    What a process puts others may get after the next collective of theirs; two must not put the
    same sample at one time, which a sampler that gives each sample to one replica takes care of. A
    process that dies in a put leaves its samples without a value. A disk that fails later is given
    up, said once: memory goes on.

    Args:
        stored: The dtype in memory (default: dtype), such as torch.bfloat16: half the bytes,
            rounded.
        budget: Bytes at most; the samples beyond go to the disk, or are never kept.
        disk: A folder, for a file that takes them.
        disk_budget: Its bytes at most.
        group: The processes of one host that share it; each of them makes it. None: this process
            alone.

    Raises:
        ValueError: For sizes that make no sense and a budget below one sample.
        MemoryError: When there is not so much memory.
        OSError: When a process can't open it (another host, no /proc), and when the disk has not so
            much room: on every rank alike, so that all can go on without it, as `open_cache` does.
    """

    def __init__(
        self,
        samples: int,
        *,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        stored: torch.dtype | None = None,
        budget: int | None = None,
        group: dist.ProcessGroup | None = None,
        disk: str | None = None,
        disk_budget: int | None = None,
    ) -> None:
        self.samples, self.shape, self.dtype, self.stored = (
            samples,
            tuple(shape),
            dtype,
            stored or dtype,
        )
        each = math.prod(self.shape) * self.stored.itemsize
        if samples < 1 or each < 1:
            raise ValueError(
                f"{samples} samples of shape {self.shape} need no cache; expected 1 or more of both"
            )
        self.capacity = (
            samples if budget is None else min(samples, (budget - HEADER) // (each + 16))
        )
        on_disk = 0
        if (
            disk is not None and budget is not None and self.capacity < samples
        ):  # of those on disk the tags are in memory
            on_disk = samples if disk_budget is None else disk_budget // page_multiple(each)
            self.capacity = min(samples, max(0, (budget - HEADER - 16 * on_disk) // (each + 16)))
            on_disk = min(on_disk, samples - self.capacity)
        self.room = self.capacity + on_disk  # samples that are kept
        if self.room < 1:
            raise NoRoom(
                f"a budget of {budget} bytes holds no sample of {each}; give "
                f"{HEADER + each + 16} or more"
            )
        tags = HEADER + 16 * self.room
        begin = -(-tags // HEADER) * HEADER
        self.nbytes = begin + each * self.capacity
        self._map = _shared(self.nbytes, group) if group is not None else _alone(self.nbytes)
        self._tags = np.frombuffer(
            self._map, dtype=np.int64, count=2 * self.room, offset=HEADER
        ).reshape(-1, 2)
        flat = torch.empty(0, dtype=self.stored, device="cpu")
        if self.capacity:
            count = each // self.stored.itemsize * self.capacity
            flat = torch.frombuffer(self._map, dtype=self.stored, count=count, offset=begin)
        self._values = flat.view(self.capacity, *self.shape)
        self._disk: DiskTier | None = None
        if disk is not None and on_disk:
            self._disk = DiskTier(
                disk, records=on_disk, shape=shape, dtype=self.stored, group=group
            )

    def put(self, samples: Tensor, values: Tensor, *, depth: int, seed: int = 0) -> int:
        """Keep values [n, *shape] of samples [n], in place of what was there of them; how many were
        kept.

        Args:
            depth: How many layers made them.
            seed: Of the augmentation; 0 where there is none.
        """
        if tuple(values.shape) != (len(samples), *self.shape):
            raise ValueError(
                f"values are {tuple(values.shape)}; expected "
                f"{(len(samples), *self.shape)}, one of each sample"
            )
        if values.dtype != self.dtype:
            raise ValueError(
                f"values are {values.dtype}, but the cache is of {self.dtype}; make it "
                f"with dtype={values.dtype}"
            )
        mine = self._checked(samples, depth)
        fits, beyond = mine < self.capacity, (mine >= self.capacity) & (mine < self.room)
        self._tags[mine[fits | beyond].numpy(), 0] = 0
        self._values[mine[fits]] = values.detach()[fits.to(values.device)].to("cpu", self.stored)
        self._mark(mine[fits], depth, seed)
        if self._disk is None or not bool(beyond.any()):
            return int(fits.sum())
        try:
            self._disk.put(
                mine[beyond] - self.capacity,
                values.detach()[beyond.to(values.device)].to("cpu", self.stored),
            )
        except OSError as error:
            self._close_disk(error)
            return int(fits.sum())
        self._mark(mine[beyond], depth, seed)
        return int((fits | beyond).sum())

    def get(self, samples: Tensor, *, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """(values [m, *shape], found [n] of bool): of the m samples that are there, in their
        order.

        Args:
            samples: [n] int64, the numbers of the samples.
            depth: How many layers made the values.
            seed: Of the augmentation; 0 where there is none.
        """
        mine = self._checked(samples, depth)
        found = self.depths(mine, seed=seed) == depth
        values = self._read(mine[found], depth, seed)
        still = self.depths(mine, seed=seed) == depth
        if not torch.equal(
            found, still
        ):  # somebody put one of them meanwhile, or the disk failed: it may be half of each
            values, found = values[still[found]], found & still
        return values.to(self.dtype), found

    def prefetch(self, samples: Tensor, *, seed: int = 0) -> None:
        """Begin to read from the disk what is there of samples [n], for the `get`s of the next
        batch but one at the latest."""
        if self._disk is None:
            return
        mine = self._checked(samples, 0)
        depths = self.depths(mine, seed=seed)
        beyond = (mine >= self.capacity) & (depths >= 0)
        try:
            self._disk.ahead(
                mine[beyond] - self.capacity, [(depth, seed) for depth in depths[beyond].tolist()]
            )
        except OSError as error:
            self._close_disk(error)

    def depths(self, samples: Tensor, *, seed: int = 0) -> Tensor:
        """At which depth each sample [n] is there with that seed, -1 where it is not: from which to
        go on to a deeper one."""
        mine = self._checked(samples, 0)
        found = torch.full_like(mine, -1)
        fits = mine < self.room
        tags = torch.from_numpy(self._tags[mine[fits].numpy()])
        found[fits] = torch.where(tags[:, 1] == seed, tags[:, 0] - 1, -1)
        return found

    def _read(self, places: Tensor, depth: int, seed: int) -> Tensor:
        beyond = places >= self.capacity
        if self._disk is None or not bool(beyond.any()):
            return self._values[places]
        values = torch.empty(len(places), *self.shape, dtype=self.stored, device="cpu")
        values[~beyond] = self._values[places[~beyond]]
        try:
            values[beyond] = self._disk.get(
                places[beyond] - self.capacity, [(depth, seed)] * int(beyond.sum())
            )
        except OSError as error:
            self._close_disk(error)
        return values

    def clear(self) -> None:
        """Forget everything."""
        self._tags[:, 0] = 0

    def close(self) -> None:
        """Let go of it in this process. It keeps and finds nothing from then on; memory goes when
        nobody has it."""
        self.room = self.capacity = 0
        self._tags, self._values = (
            self._tags[:0].copy(),
            torch.empty(0, *self.shape, dtype=self.stored, device="cpu"),
        )
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()
        with contextlib.suppress(BufferError):  # somebody still looks at it
            self._map.close()

    def _mark(self, places: Tensor, depth: int, seed: int) -> None:
        """These are there: last of all, so that what ends a put in the middle leaves none."""
        self._tags[places.numpy(), 1] = seed
        self._tags[places.numpy(), 0] = depth + 1

    def _close_disk(self, error: OSError) -> None:
        self.room, self._disk = self.capacity, None
        logger.warning(
            "the cache's file is not used any more, and training goes on without it: %s", error
        )

    def _checked(self, samples: Tensor, depth: int) -> Tensor:
        if depth < 0:
            raise ValueError(f"depth is {depth}; it must be 0 or more")
        mine = samples.to("cpu", torch.int64)
        if mine.dim() != 1 or (
            len(mine) and not 0 <= int(mine.min()) <= int(mine.max()) < self.samples
        ):
            raise ValueError(
                f"samples are {samples}; expected one dimension of numbers from 0 to "
                f"{self.samples - 1}"
            )
        return mine


def open_cache(
    samples: int,
    *,
    budget: int | None = None,
    group: dist.ProcessGroup | None = None,
    disk: str | None = None,
    **options: Any,
) -> ActivationCache | None:
    """An ActivationCache, or None on every rank where there is no room for it, said once: training
    goes on without.

    Args:
        budget: None: half of the memory that is free to the first rank (`free_memory`).
        disk: Where there is no room for the file, memory alone.
    """
    first = group is None or dist.get_rank(group) == 0
    if budget is None:
        budget = (
            gather(free_memory() // 2, group=group)[0] if group is not None else free_memory() // 2
        )
    for folder in dict.fromkeys((disk, None)):
        try:
            return ActivationCache(samples, budget=budget, group=group, disk=folder, **options)
        except (OSError, MemoryError, NoRoom) as error:
            what = "on disk " if folder is not None else ""
            if first:
                logger.warning(
                    "frozen layers have no cache %sin this run, which goes on without it: %s",
                    what,
                    error,
                )
    return None


def _make(nbytes: int) -> int:
    """A file without a name, all of whose bytes are there."""
    free = free_memory()
    if nbytes > free:
        raise MemoryError(
            f"a cache of {nbytes} bytes does not fit: {free} are free; give it a budget, "
            "or store 16 bits"
        )
    file_number = os.memfd_create("pyops-activations", os.MFD_CLOEXEC)
    os.posix_fallocate(file_number, 0, nbytes)
    return file_number


def _alone(nbytes: int) -> mmap.mmap:
    file_number = _make(nbytes)
    try:
        return mmap.mmap(file_number, nbytes)
    finally:
        os.close(file_number)


def _shared(nbytes: int, group: dist.ProcessGroup) -> mmap.mmap:
    """The same memory on every rank, or the same error."""
    error: Exception | None = None
    file_number, memory, token = -1, None, secrets.token_bytes(16)
    first = dist.get_rank(group) == 0
    if first:
        try:
            file_number = _make(nbytes)
            memory = mmap.mmap(file_number, nbytes)
            memory[:16] = token
        except (OSError, MemoryError) as caught:
            error = caught
    place = gather((f"/proc/{os.getpid()}/fd/{file_number}", token, nbytes), group=group)
    if not first:
        path, token, size = place[0]
        try:
            if size != nbytes:
                raise ValueError(
                    f"rank 0 makes a cache of {size} bytes, this rank one of {nbytes}; "
                    "give all ranks the same"
                )
            if not path.endswith("/-1"):
                other = os.open(path, os.O_RDWR)
                memory = mmap.mmap(other, nbytes) if os.fstat(other).st_size == nbytes else None
                os.close(other)
                if memory is None or memory[:16] != token:
                    raise OSError(
                        f"{path} is not the memory that rank 0 made; it is on another host"
                    )
        except (OSError, ValueError) as caught:
            error = caught
    try:
        agree(error, group=group)
    finally:
        if file_number >= 0:
            os.close(file_number)
    assert memory is not None
    return memory
