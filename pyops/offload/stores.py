"""Where tiles of states are between steps: in host memory, or in a file through three tiles of
memory.

file       read 0 | read 1 | read 2           | read 3           | ...
processor           step 0 | step 1           | step 2           |
file                         write 0          | write 1          |
memory     a      | b      | c                | a again: write 0 is over
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyops.offload.async_file import AsyncFile, Transfer, aligned_empty
from pyops.offload.tiles import Tile

__all__ = ["DiskStore", "HostStore", "Store"]


class Store(Protocol):
    """Regions of bytes, one for each tile; zeros at first."""

    nbytes: int
    resident_bytes: int

    def visit(self, numbers: Sequence[int], *, fresh: set[int]) -> Iterator[tuple[int, Tensor]]:
        """(number, region) for each tile in turn; what the loop's body changes in a region is kept.
        Those of `fresh` hold nothing of worth before. A loop that is left early may leave the tile
        it was at, and the next, as they were."""

    def read(self, number: int, start: int, out: Tensor) -> None:
        """Bytes of a region from `start` on, into `out`."""

    def write(self, number: int, start: int, tensor: Tensor) -> None:
        """`tensor` into a region from `start` on."""

    def close(self) -> None:
        """Give everything back."""


class HostStore:
    """Regions in host memory, pinned where CUDA tensors come and go."""

    def __init__(self, tiles: Sequence[Tile], *, pin_memory: bool) -> None:
        self._regions = [
            torch.zeros(tile.nbytes, dtype=torch.uint8, pin_memory=pin_memory, device="cpu")
            for tile in tiles
        ]
        self.nbytes = self.resident_bytes = sum(tile.nbytes for tile in tiles)

    def visit(self, numbers: Sequence[int], *, fresh: set[int]) -> Iterator[tuple[int, Tensor]]:
        for number in numbers:
            yield number, self._regions[number]

    def read(self, number: int, start: int, out: Tensor) -> None:
        bytes_of = out.view(-1).view(torch.uint8)
        bytes_of.copy_(self._regions[number][start : start + bytes_of.numel()])

    def write(self, number: int, start: int, tensor: Tensor) -> None:
        bytes_of = tensor.reshape(-1).view(torch.uint8)
        self._regions[number][start : start + bytes_of.numel()].copy_(bytes_of)

    def close(self) -> None:
        self._regions = []


class DiskStore:
    """Regions in a file of `folder` that has no name: the disk's space comes back when the process
    ends, however it does.

    Raises:
        OSError: Naming file and size, when the disk has no room for all of it.
    """

    AHEAD = 3  # regions in memory: one is read, one stepped, one written

    def __init__(
        self, tiles: Sequence[Tile], folder: str, *, pin_memory: bool, engine: str = "auto"
    ) -> None:
        self._tiles = list(tiles)
        self.nbytes = sum(tile.nbytes for tile in tiles)
        self.file = AsyncFile(folder, nbytes=self.nbytes, engine=engine)
        largest = max((tile.nbytes for tile in tiles), default=0)
        self._buffers = [
            aligned_empty(largest, pin_memory=pin_memory)
            for _ in range(min(self.AHEAD, len(tiles)))
        ]
        self.resident_bytes = sum(buffer.numel() for buffer in self._buffers)

    def visit(self, numbers: Sequence[int], *, fresh: set[int]) -> Iterator[tuple[int, Tensor]]:
        buffers = self._buffers
        regions: list[Tensor] = []
        reads: list[Transfer | None] = []
        writes: list[Transfer] = []

        def fetch(turn: int) -> None:
            tile, place = self._tiles[numbers[turn]], turn % len(buffers)
            if turn >= len(buffers):
                writes[turn - len(buffers)].wait()
            regions.append(buffers[place][: tile.nbytes])
            reads.append(
                None
                if numbers[turn] in fresh
                else self.file.read(regions[turn], offset=tile.offset)
            )

        try:
            for turn, number in enumerate(numbers):
                if turn == 0:
                    fetch(0)
                if turn + 1 < len(numbers) and len(buffers) > 1:
                    fetch(turn + 1)
                read = reads[turn]
                if read is not None:
                    read.wait()
                yield number, regions[turn]
                writes.append(self.file.write(regions[turn], offset=self._tiles[number].offset))
        finally:
            self._settle([*writes, *(read for read in reads if read is not None)])

    @staticmethod
    def _settle(transfers: Sequence[Transfer]) -> None:
        """Wait for all, so that the buffers are free; raise the first error."""
        errors = []
        for transfer in transfers:
            try:
                transfer.wait()
            except OSError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def read(self, number: int, start: int, out: Tensor) -> None:
        self.file.read(out, offset=self._tiles[number].offset + start).wait()

    def write(self, number: int, start: int, tensor: Tensor) -> None:
        self.file.write(tensor.contiguous(), offset=self._tiles[number].offset + start).wait()

    def close(self) -> None:
        self.file.close()
        self._buffers = []
