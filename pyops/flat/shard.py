"""Shard, ShardElsewhere and Shards: parts of a tensor on one rank, as boxes or as ranges of the
flattened tensor.

range [3, 14) of a [4, 5] tensor         . . . # #     box [1, 2] at (0, 3)
                                         # # # # #     box [1, 5] at (1, 0)
                                         # # # # .     box [1, 4] at (2, 0)
                                         . . . . .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "Box",
    "Shard",
    "ShardElsewhere",
    "Shards",
    "TensorElsewhere",
    "boxes_of_range",
    "meeting",
    "whole_of_boxes",
]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, size), a number for each dim


@dataclass(frozen=True)
class Shard:
    """A part of a larger tensor, as checkpoints store it: `tensor` begins at `offset` of the whole,
    in one of two forms.

    box     offset has one number per dim: Shard((4, 6), (2, 0), tensor [2, 6])
    range   offset has one number and `tensor` one dim, whatever the whole has: elements
            [offset, offset + n) of the flattened, row-major whole: Shard((4, 6), (9,), tensor [5])

    Attributes:
        copy: Another rank holds the same part and writes it; here it is only for loading.

    Raises:
        ValueError: For a part that does not lie within the whole.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the part."""
        return self.tensor.dtype

    @property
    def is_range(self) -> bool:
        """Whether this is a range of the flattened tensor. A box of one dim is one too."""
        return len(self.offset) == len(self.shape) == 1

    def __post_init__(self) -> None:
        whole = (prod(self.global_shape),) if self.is_range else self.global_shape
        fits = len(whole) == len(self.offset) == len(self.shape)
        ends = [o + n for o, n in zip(self.offset, self.shape, strict=False)]
        if (
            not fits
            or any(o < 0 for o in self.offset)
            or any(e > n for e, n in zip(ends, whole, strict=True))
        ):
            raise ValueError(
                f"a shard of shape {self.shape} at offset {self.offset} does not lie "
                f"within {self.global_shape}; "
                "offset needs one number per dim, or one number and a tensor of one dim "
                "for a range of the flattened whole"
            )


class TensorElsewhere(Protocol):
    """A tensor that is read when it is needed: an optimizer's state in a file, say."""

    @property
    def shape(self) -> Sequence[int]:
        """The size of each dimension."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that `read` gives."""
        ...

    def read(self) -> Tensor:
        """The tensor as it is now, in new CPU memory."""


class ShardElsewhere(Shard):
    """A Shard whose `tensor` is read, into new memory, each time it is asked for.

    Args:
        there: What reads it.
    """

    there: TensorElsewhere

    def __init__(
        self,
        global_shape: tuple[int, ...],
        offset: tuple[int, ...],
        there: TensorElsewhere,
        *,
        copy: bool = False,
    ) -> None:
        for name, value in {
            "global_shape": global_shape,
            "offset": offset,
            "there": there,
            "copy": copy,
        }.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.there.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the part."""
        return self.there.dtype

    @property
    def tensor(self) -> Tensor:  # type: ignore[override]
        """The part, read anew at each access."""
        return self.there.read()


@dataclass(frozen=True)
class Shards:
    """Several parts of one tensor on one rank, which owns a chunk of each of several buckets; may
    be none at all.

    Raises:
        ValueError: For parts of tensors that differ in shape or dtype.
    """

    parts: tuple[Shard, ...]

    def __post_init__(self) -> None:
        kinds = {(tuple(part.global_shape), part.dtype) for part in self.parts}
        if len(kinds) > 1:
            raise ValueError(
                "Shards are parts of one tensor, but these are of "
                f"{sorted(map(str, kinds))}; make one for each"
            )

    def __iter__(self) -> Iterator[Shard]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that hold elements [start, stop) of the flattened tensor of this shape, in that order;
    each lies in one piece.

    Args:
        shape: Of the tensor.
        start: The first element of the flattened tensor.
        stop: The element behind the last one.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows [first, last)
    if first > last:  # within one row
        inner = boxes_of_range(shape[1:], start - last * row, stop - last * row)
        return [((last, *offset), (1, *size)) for offset, size in inner]
    found = []
    if start < first * row:
        inner = boxes_of_range(shape[1:], start - (first - 1) * row, row)
        found += [((first - 1, *offset), (1, *size)) for offset, size in inner]
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if last * row < stop:
        inner = boxes_of_range(shape[1:], 0, stop - last * row)
        found += [((last, *offset), (1, *size)) for offset, size in inner]
    return found


def meeting(a: Box, b: Box) -> Box | None:
    """What two boxes have in common."""
    low = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    if any(x >= y for x, y in zip(low, high, strict=True)):
        return None
    return low, tuple(y - x for x, y in zip(low, high, strict=True))


def whole_of_boxes(parts: Sequence[tuple[Box, Tensor]], shape: Sequence[int]) -> Tensor:
    """The tensor that boxes make together.

    Args:
        parts: Boxes, each with the tensor of what is in it.
        shape: Of the whole.

    Returns:
        A new tensor in the dtype of the first part.

    Raises:
        ValueError: They do not cover the whole once; the first element that is missing, or in
            several, is named.
    """
    boxes = [box for box, _ in parts if prod(box[1])]
    covered = sum(prod(size) for _, size in boxes)
    if covered != prod(shape) or any(meeting(a, b) for a, b in combinations(boxes, 2)):
        count = torch.zeros(tuple(shape), dtype=torch.int32, device="cpu")
        for offset, size in boxes:
            count[_slices(offset, size)] += 1
        wrong = (count != 1).nonzero()[0].tolist()
        times = int(count[tuple(wrong)])
        raise ValueError(
            f"element {wrong} of a tensor of shape {list(shape)} is in {times} of the "
            f"{len(parts)} parts, and each must be in one; all ranks must hold the parts that "
            "their placements name"
        )
    whole = parts[0][1].new_empty(tuple(shape))
    for (offset, size), tensor in parts:
        whole[_slices(offset, size)] = tensor
    return whole


def _slices(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
