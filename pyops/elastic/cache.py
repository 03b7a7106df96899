"""ActivationCache: what frozen layers say to each sample, in one piece of memory that all processes of a host share.

    tags     | depth + 1, seed | 0, 0 | depth + 1, seed | ...     0: nothing there
    values   | sample 0        |      | sample 2        | ...     as many samples as the budget allows

The memory has no name: rank 0 makes it, the others open it through /proc, and it is gone when the last process is, however that
ended. A sample's values are valid for the (depth, augmentation seed) of its tag alone.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.agreement import agree, gather

__all__ = ["ActivationCache"]

HEADER = 4096  # bytes; begins with a token that says whose memory it is


class ActivationCache:
    """Activations of `samples` samples, each of `shape` and `dtype`, keyed by (sample, depth, seed).

    stored: the dtype in memory (default: dtype), such as torch.bfloat16: half the bytes, rounded. budget: bytes at most; the
        samples beyond are never kept. group: the processes of one host that share it; each of them makes it. None: this process
        alone.

    What a process puts others may get after the next collective of theirs; two must not put the same sample at one time, which
    a sampler that gives each sample to one replica takes care of. A process that dies in a put leaves its samples without a
    value.

    ValueError for sizes that make no sense and a budget below one sample; MemoryError when there is not so much memory; OSError
    when a process can't open it (another host, no /proc): on every rank alike, so that all can go on without it.
    """

    def __init__(
        self, samples: int, *, shape: Sequence[int], dtype: torch.dtype = torch.float32, stored: torch.dtype | None = None,
        budget: int | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self.samples, self.shape, self.dtype, self.stored = samples, tuple(shape), dtype, stored or dtype
        each = math.prod(self.shape) * self.stored.itemsize
        if samples < 1 or each < 1:
            raise ValueError(f"{samples} samples of shape {self.shape} need no cache; expected 1 or more of both")
        self.capacity = samples if budget is None else min(samples, (budget - HEADER) // (each + 16))
        if self.capacity < 1:
            raise ValueError(f"a budget of {budget} bytes holds no sample of {each}; give {HEADER + each + 16} or more")
        tags = HEADER + 16 * self.capacity
        begin = -(-tags // HEADER) * HEADER
        self.nbytes = begin + each * self.capacity
        self._map = _shared(self.nbytes, group) if group is not None else _alone(self.nbytes)
        self._tags = np.frombuffer(self._map, dtype=np.int64, count=2 * self.capacity, offset=HEADER).reshape(-1, 2)
        flat = torch.frombuffer(self._map, dtype=self.stored, count=each // self.stored.itemsize * self.capacity, offset=begin)
        self._values = flat.view(self.capacity, *self.shape)

    def put(self, samples: Tensor, values: Tensor, *, depth: int, seed: int = 0) -> int:
        """Keep values [n, *shape] of samples [n], in place of what was there of them; how many were kept.

        depth: how many layers made them. seed: of the augmentation; 0 where there is none.
        """
        if tuple(values.shape) != (len(samples), *self.shape):
            raise ValueError(f"values are {tuple(values.shape)}; expected {(len(samples), *self.shape)}, one of each sample")
        if values.dtype != self.dtype:
            raise ValueError(f"values are {values.dtype}, but the cache is of {self.dtype}; make it with dtype={values.dtype}")
        mine = self._checked(samples, depth)
        fits = mine < self.capacity
        kept = mine[fits]
        places = kept.numpy()
        self._tags[places, 0] = 0
        self._values[kept] = values.detach()[fits.to(values.device)].to("cpu", self.stored)
        self._tags[places, 1] = seed
        self._tags[places, 0] = depth + 1
        return len(kept)

    def get(self, samples: Tensor, *, depth: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        """(values [m, *shape], found [n] of bool): of the m samples that are there, in their order."""
        mine = self._checked(samples, depth)
        found = self.depths(mine, seed=seed) == depth
        return self._values[mine[found]].to(self.dtype), found

    def depths(self, samples: Tensor, *, seed: int = 0) -> Tensor:
        """At which depth each sample [n] is there with that seed, -1 where it is not: from which to go on to a deeper one."""
        mine = self._checked(samples, 0)
        found = torch.full_like(mine, -1)
        fits = mine < self.capacity
        tags = torch.from_numpy(self._tags[mine[fits].numpy()])
        found[fits] = torch.where(tags[:, 1] == seed, tags[:, 0] - 1, -1)
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._tags[:, 0] = 0

    def _checked(self, samples: Tensor, depth: int) -> Tensor:
        if depth < 0:
            raise ValueError(f"depth is {depth}; it must be 0 or more")
        mine = samples.to("cpu", torch.int64)
        if mine.dim() != 1 or (len(mine) and not 0 <= int(mine.min()) <= int(mine.max()) < self.samples):
            raise ValueError(f"samples are {samples}; expected one dimension of numbers from 0 to {self.samples - 1}")
        return mine


def _make(nbytes: int) -> int:
    """A file without a name, all of whose bytes are there."""
    with open("/proc/meminfo") as file:
        free = next(1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    if nbytes > free:
        raise MemoryError(f"a cache of {nbytes} bytes does not fit: {free} are free; give it a budget, or store 16 bits")
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
                raise ValueError(f"rank 0 makes a cache of {size} bytes, this rank one of {nbytes}; give all ranks the same")
            if not path.endswith("/-1"):
                other = os.open(path, os.O_RDWR)
                memory = mmap.mmap(other, nbytes) if os.fstat(other).st_size == nbytes else None
                os.close(other)
                if memory is None or memory[:16] != token:
                    raise OSError(f"{path} is not the memory that rank 0 made; it is on another host")
        except (OSError, ValueError) as caught:
            error = caught
    try:
        agree(error, group=group)
    finally:
        if file_number >= 0:
            os.close(file_number)
    assert memory is not None
    return memory
