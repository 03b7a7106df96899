"""Parameters in a file between their uses: this rank's shards, each in a region of its own.

    file     | block 0 | block 1 | block 2 | ...
    forward    read 2 | gather 1 | compute 0         in the order of the last time
    step       read 2 | step 1   | write 0

A shard is a tensor that has memory only from its read to the end of the gather, or of its step.
Rajbhandari et al., ZeRO-Infinity, arXiv:2104.07857.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pyops.comm.agreement import ranks_agree
from pyops.comm.collectives.work import Work
from pyops.mesh import ProcessGroupLike
from pyops.offload import AsyncFile
from pyops.offload.async_file import Transfer

__all__ = [
    "FileSlice",
    "ParameterFile",
    "PendingRead",
    "in_memory",
    "in_turn",
    "open_file",
    "region_bytes",
]

PAGE = 4096


def region_bytes(nbytes: int) -> int:
    """Bytes of the region of a tensor of so many: regions begin where O_DIRECT can."""
    return -(-nbytes // PAGE) * PAGE


class FileSlice:
    """A tensor, 1-D and all of its storage, and where in the file it is. It has memory from `load`
    to `drop`."""

    def __init__(self, file: AsyncFile, offset: int, tensor: Tensor) -> None:
        self._file, self._offset, self.tensor, self._nbytes = file, offset, tensor, tensor.nbytes
        self._host: Tensor | None = None  # of a tensor on a GPU, while it travels
        self._reading: Transfer | None = None
        self._writing: Transfer | None = None

    @property
    def is_there(self) -> bool:
        """Whether the tensor has memory; its values may still be on their way."""
        return self.tensor.untyped_storage().nbytes() > 0

    def make(self) -> None:
        """Memory for the tensor, whatever its values."""
        self._settle()
        if not self.is_there:
            self.tensor.untyped_storage().resize_(self._nbytes)

    def _hosted(self) -> Tensor:
        if not self.tensor.is_cuda:
            return self.tensor
        if self._host is None:
            self._host = torch.empty(
                self.tensor.shape, dtype=self.tensor.dtype, pin_memory=True, device="cpu"
            )
        return self._host

    def fetch(self) -> None:
        """Begin to read, unless it is there."""
        if not self.is_there:
            self.tensor.untyped_storage().resize_(self._nbytes)
            self._reading = self._file.read(self._hosted(), offset=self._offset)

    def load(self) -> Tensor:
        """The tensor with its values.

        Raises:
            OSError: Naming the file.
        """
        self.fetch()
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
            if self._host is not None:
                self.tensor.copy_(self._host)
        return self.tensor

    def save(self) -> None:
        """Begin to write what the tensor holds; it must stay as it is until `drop`."""
        self._settle()
        host = self._hosted()
        if host is not self.tensor:
            host.copy_(self.tensor)
        self._writing = self._file.write(host, offset=self._offset)

    def drop(self) -> None:
        """Give the memory back, when what is under way is over."""
        self._settle()
        if self.is_there:
            self.tensor.untyped_storage().resize_(0)
        self._host = None

    def _settle(self) -> None:
        for transfer in (self._reading, self._writing):
            if transfer is not None:
                transfer.wait()
        self._reading = self._writing = None


class ParameterFile:
    """A nameless file in a folder with room for regions, handed out one after the other."""

    def __init__(self, folder: str, *, nbytes: int) -> None:
        self.file, self.nbytes = AsyncFile(folder, nbytes=nbytes), nbytes
        self._end = 0

    def place(self, tensor: Tensor) -> FileSlice:
        """A region that holds what the tensor, which is all of its storage, holds now; its memory
        is given back."""
        region = FileSlice(self.file, self._end, tensor)
        self._end += region_bytes(tensor.nbytes)
        assert self._end <= self.nbytes
        region.save()
        region.drop()
        return region


def open_file(folder: str, *, nbytes: int, group: ProcessGroupLike) -> ParameterFile:
    """A rank's file. A collective; OSError, on every rank, where one has no room."""
    with ranks_agree(group):
        return ParameterFile(folder, nbytes=nbytes)


def in_turn(regions: Sequence[FileSlice], *, changed: bool) -> Iterator[int]:
    """Each region's number while it is in memory: the next one is read meanwhile, and the one
    before written if `changed`."""
    try:
        for number, region in enumerate(regions):
            region.fetch()
            if number + 1 < len(regions):
                regions[number + 1].fetch()
            region.load()
            yield number
            if changed:
                region.save()
            if number:
                regions[number - 1].drop()
    finally:
        for region in regions:
            region.drop()


@contextmanager
def in_memory(regions: Sequence[FileSlice]) -> Iterator[None]:
    """Within the block all are in memory; what it changes is kept."""
    for region in regions:
        region.fetch()
    for region in regions:
        region.load()
    try:
        yield
    finally:
        for region in regions:
            region.save()
        for region in regions:
            region.drop()


class PendingRead(Work):
    """A gather after which the region's memory is given back; without one, the read of the region
    itself."""

    def __init__(self, work: Work | None, region: FileSlice) -> None:
        self._work, self._region = work, region

    def wait(self) -> Tensor:
        if self._work is None:
            return self._region.load()
        result = self._work.wait()
        self._region.drop()
        return result

    def is_completed(self) -> bool:
        return self._work is not None and self._work.is_completed()
