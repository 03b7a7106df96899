"""Weights that neighboring ranks share: which part of each a rank holds, and which of the ranks
counts and saves it.

    layout with tensor 2        rank 0            rank 1
    a weight that is cut        first half        second half
    a bias with copies          counts, saves     has it too
    a weight without placement  counts, saves     has it too
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import Placement, Shard, Shards

__all__ = ["counts", "part_of", "placements_of", "shard_of"]


def placements_of(layers: Mapping[str, nn.Module]) -> dict[str, Placement]:
    """{name in the model: Placement} of the parameters that have one.

    Args:
        layers: All of the model, by name.
    """
    return {
        f"{name}.{own}": place
        for name, layer in layers.items()
        for own, place in Placement.of(layer).items()
    }


def counts(place: Placement | None, *, is_first: bool) -> bool:
    """Whether this rank's elements count in a norm: each element of the whole counts once.

    Args:
        place: Of the parameter; None: every rank holds it whole.
        is_first: Whether the rank is the first of those that share weights.
    """
    return is_first if place is None else place.first


def shard_of(
    tensor: Tensor, place: Placement | None, *, writes: bool, is_first: bool
) -> Shard | Shards:
    """What a checkpoint has of a rank's parameter, or of a state of an optimizer that is shaped
    like it: a view of the part without its padding.

    Args:
        tensor: This rank's.
        place: Of the parameter; None: every rank holds it whole.
        writes: False where a rank of another replica writes the same.
        is_first: Whether the rank is the first of those that share weights.
    """
    tensor = tensor.detach()
    if place is not None and tuple(tensor.shape) == place.local_shape and tensor.dim():
        return place.shards(tensor.reshape(-1), copy=not writes)
    copy = not (writes and is_first)  # a number of steps, say, is the same on every rank
    return Shard(tuple(tensor.shape), (0,) * tensor.dim(), tensor, copy=copy)


def part_of(value: Any, place: Placement | None) -> Tensor:
    """A rank's tensor, in memory of its own, of what a state has: a tensor, one of a checkpoint
    that is not read yet, or what `shard_of` gave this rank.

    Args:
        value: Of the state.
        place: Of the parameter; None: every rank holds it whole.
    """
    if isinstance(value, Shard):
        return value.tensor.clone()
    if isinstance(value, Shards):
        assert place is not None
        dtype = value.parts[0].dtype if value.parts else None
        local = torch.zeros(place.local_shape, dtype=dtype)
        for part in value.parts:
            place.part(local).copy_(part.tensor)
        return local
    whole: Tensor = value.read() if hasattr(value, "read") else value.clone()
    if place is None or not whole.dim() or tuple(whole.shape) != place.global_shape:
        return whole
    return place.take(whole)
