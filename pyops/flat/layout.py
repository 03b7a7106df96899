"""FlatLayout: which tensor lies where in a flat buffer."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from torch import Tensor

from pyops.flat.shard import Shard, Shards

__all__ = ["ALIGNMENT", "FlatLayout"]

ALIGNMENT = 64  # elements: 256 bytes of fp32, 128 of bf16; at least a cache line of either


@dataclass(frozen=True)
class FlatLayout:
    """Which tensor lies where in a flat buffer; pure arithmetic.

    Attributes:
        names, shapes, offsets: One entry per tensor, offsets in elements, increasing.
        numel: Elements of the buffer, padding included.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def plan(
        cls,
        tensors: Sequence[tuple[str, Sequence[int]]],
        *,
        alignment: int = ALIGNMENT,
        multiple_of: int = 1,
    ) -> FlatLayout:
        """Lay the (name, shape) pairs one after the other, in the order given.

        Args:
            alignment: Every offset is a multiple of it.
            multiple_of: So is the buffer's length (the number of ranks, for shards of one size).

        Raises:
            ValueError: For a repeated name or for numbers below 1.
        """
        names = tuple(name for name, _ in tensors)
        if len(set(names)) != len(names):
            repeated = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(
                f"names must differ, but these repeat: {repeated}; give each tensor its own name"
            )
        if alignment < 1 or multiple_of < 1:
            raise ValueError(
                f"alignment and multiple_of must be at least 1, got {alignment} and {multiple_of}"
            )
        shapes = tuple(tuple(int(n) for n in shape) for _, shape in tensors)
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(-(-end // alignment) * alignment)
            end = offsets[-1] + prod(shape)
        return cls(names, shapes, tuple(offsets), -(-end // multiple_of) * multiple_of)

    def slice(self, name: str) -> builtins.slice:
        """Where the tensor's elements are in the buffer. KeyError names the tensors there are."""
        if name not in self.names:
            raise KeyError(f"no tensor {name!r} in this layout; it has {list(self.names)}")
        return self.slice_at(self.names.index(name))

    def slice_at(self, index: int) -> builtins.slice:
        """As `slice`, by the tensor's position."""
        start = self.offsets[index]
        return builtins.slice(start, start + prod(self.shapes[index]))

    def shards(self, start: int, stop: int) -> list[tuple[str, builtins.slice, builtins.slice]]:
        """The parts of tensors within [start, stop): (name, slice of the flattened tensor, slice of
        the buffer)."""
        found = []
        for index, name in enumerate(self.names):
            whole = self.slice_at(index)
            low, high = max(start, whole.start), min(stop, whole.stop)
            if low < high:
                found.append(
                    (
                        name,
                        builtins.slice(low - whole.start, high - whole.start),
                        builtins.slice(low, high),
                    )
                )
        return found

    def cut(self, local: Tensor, ranges: Sequence[tuple[int, int]]) -> dict[str, Shards]:
        """The tensors' parts within `local`, which holds these ranges [start, stop) of the buffer
        one after the other.

        Views of `local`; a tensor with nothing there has no entry, one without elements an empty
        part.

        Raises:
            ValueError: Unless `local` is of one dim and exactly as long as the ranges, which must
                lie within the buffer, in order.
        """
        ends = [0, *(n for pair in ranges for n in pair), self.numel]
        length = sum(stop - start for start, stop in ranges)
        if sorted(ends) != ends or tuple(local.shape) != (length,):
            raise ValueError(
                f"a tensor of shape {tuple(local.shape)} can't hold the ranges "
                f"{list(ranges)} of a buffer of {self.numel} "
                f"elements; expected ranges in increasing order, and shape ({length},)"
            )
        joined: list[list[int]] = []
        for start, stop in ranges:
            if joined and joined[-1][1] == start:
                joined[-1][1] = stop
            else:
                joined.append([start, stop])
        empty = {
            name: shape
            for name, shape in zip(self.names, self.shapes, strict=True)
            if not prod(shape)
        }
        found: dict[str, list[Shard]] = {
            name: [Shard(shape, (0,), local[:0])] for name, shape in empty.items()
        }
        begin = 0
        for start, stop in joined:
            for name, part, place in self.shards(start, stop):
                here = local[begin + place.start - start : begin + place.stop - start]
                found.setdefault(name, []).append(
                    Shard(self.shapes[self._index[name]], (part.start,), here)
                )
            begin += stop - start
        return {name: Shards(tuple(parts)) for name, parts in found.items()}

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}
