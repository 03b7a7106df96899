"""Parts of a tensor, as boxes: where two parts meet, and how a range of the flattened tensor is made of boxes.

range [3, 14) of a [4, 5] tensor         . . . # #     box [1, 2] at (0, 3)
                                         # # # # #     box [1, 5] at (1, 0)
                                         # # # # .     box [1, 4] at (2, 0)
                                         . . . . .
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from pyops.flat import Shard, Shards

__all__ = ["Box", "boxes_of_range", "meeting", "views"]

Box = tuple[tuple[int, ...], tuple[int, ...]]  # (offset, size), a number for each dim


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Boxes that hold elements [start, stop) of the flattened tensor of this shape, in that order; each lies in one piece."""
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


def views(target: Tensor | Shard | Shards, *, flat: bool) -> list[tuple[Box, Tensor]]:
    """The target's boxes, each with the view of its memory. flat: of the flattened tensor, where all of it is ranges."""
    if isinstance(target, Tensor):
        if flat:
            return [(((0,), (target.numel(),)), target.view(-1))]
        return [(((0,) * target.dim(), tuple(target.shape)), target)]
    found: list[tuple[Box, Tensor]] = []
    for part in target if isinstance(target, Shards) else (target,):
        if flat or len(part.offset) == len(part.global_shape):
            found.append(((tuple(part.offset), tuple(part.tensor.shape)), part.tensor))
            continue
        at = 0
        for box in boxes_of_range(part.global_shape, part.offset[0], part.offset[0] + len(part.tensor)):
            n = prod(box[1])
            found.append((box, part.tensor[at : at + n].view(box[1])))
            at += n
    return found
