"""Which part of which parameter is stepped together: pure arithmetic.

    parameters   |   0: 10 M elements   | 1 |2|   3: 4 M   |   parameters keep their order; a long
                                                               one is cut,
    tiles        |  0   |  1   |  2   |    3    |  4  |         short ones share a tile

A tile's states lie one after the other in one region of the file, so that a tile is one read and
one write:

    region   | 0: exp_avg | 0: exp_avg_sq | 0: master | 1: exp_avg | ...
             every field begins at a multiple of 64 bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Field", "Segment", "Tile", "plan_tiles"]

CUT = 1024  # elements: parameters are cut at multiples of it
PAGE = 4096
LINE = 64


@dataclass(frozen=True)
class Field:
    """One state of a segment: its dtype, and where it begins within the tile's region, in bytes."""

    dtype: torch.dtype
    start: int

    def view(self, region: Tensor, numel: int) -> Tensor:
        """The state in a uint8 region."""
        return region[self.start : self.start + numel * self.dtype.itemsize].view(self.dtype)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of the flattened parameter number `parameter`, and its states by
    name."""

    parameter: int
    start: int
    stop: int
    fields: Mapping[str, Field]

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Tile:
    """Segments that are stepped together.

    Attributes:
        offset: Of their region in the file.
        nbytes: Its length, a multiple of a page.
    """

    segments: tuple[Segment, ...]
    offset: int
    nbytes: int


def plan_tiles(
    parameters: Sequence[tuple[int, Mapping[str, torch.dtype]]], *, tile_bytes: int
) -> list[Tile]:
    """Cut parameters, given as (number of elements, dtypes of its states by name), into tiles of
    about `tile_bytes` of states.

    A parameter without states counts by its elements, 4 bytes each.

    Raises:
        ValueError: For a tile_bytes below 64 KiB.
    """
    if tile_bytes < 64 << 10:
        raise ValueError(f"tile_bytes is {tile_bytes}; give 65536 or more, 32 MiB say")
    tiles: list[Tile] = []
    waiting: list[Segment] = []
    size = weight = offset = 0
    for number, (numel, dtypes) in enumerate(parameters):
        per_element = sum(dtype.itemsize for dtype in dtypes.values()) or 4
        start = 0
        while start < numel:
            room = max(0, tile_bytes - weight) // per_element // CUT * CUT
            if waiting and (
                room == 0 or (room < numel - start and room * per_element < tile_bytes // 4)
            ):
                room = 0  # no slivers
            if room == 0 and waiting:
                tiles.append(Tile(tuple(waiting), offset, _up(size, PAGE)))
                offset += tiles[-1].nbytes
                waiting, size, weight = [], 0, 0
                continue
            stop = min(numel, start + max(room, CUT))
            fields = {}
            for name, dtype in dtypes.items():
                fields[name] = Field(dtype, size)
                size = _up(size + (stop - start) * dtype.itemsize, LINE)
            waiting.append(Segment(number, start, stop, fields))
            weight += (stop - start) * per_element
            start = stop
    if waiting:
        tiles.append(Tile(tuple(waiting), offset, _up(size, PAGE)))
    return tiles


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
