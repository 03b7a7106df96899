"""What a load fills: the boxes of a tensor, a part or several, each with the view of its memory."""

from __future__ import annotations

from math import prod

from torch import Tensor

from pyops.flat import Box, Shard, Shards, boxes_of_range

__all__ = ["views"]


def views(target: Tensor | Shard | Shards, *, flat: bool) -> list[tuple[Box, Tensor]]:
    """The target's boxes, each with the view of its memory.

    Args:
        flat: Of the flattened tensor, where all of it is ranges.
    """
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
        for box in boxes_of_range(
            part.global_shape, part.offset[0], part.offset[0] + len(part.tensor)
        ):
            n = prod(box[1])
            found.append((box, part.tensor[at : at + n].view(box[1])))
            at += n
    return found
