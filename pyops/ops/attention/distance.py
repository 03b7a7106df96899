"""Biases that depend on the distance of key and query alone: T5's buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["relative_buckets"]


def relative_buckets(
    num_buckets: int,
    *,
    max_distance: int,
    bidirectional: bool,
    device: torch.device | None = None,
) -> Tensor:
    """The bucket of each distance, key place less query place, from -max_distance to max_distance;
    farther ones share the last (Raffel et al., arXiv:1910.10683, section 2.1; the arithmetic is
    that of T5's code, whose buckets checkpoints were trained with).

    Args:
        num_buckets: rows of the table of biases.
        max_distance: distance from which on all share the last bucket.
        bidirectional: whether distances above 0 have half of the buckets, or share that of 0.
        device: where the result is.

    Returns:
        int32 [2 max_distance + 1].
    """
    distance = torch.arange(-max_distance, max_distance + 1, device=device)
    side, first = num_buckets, torch.zeros_like(distance)
    if bidirectional:
        side //= 2
        first = (distance > 0) * side
        far = distance.abs()
    else:
        far = (-distance).clamp(min=0)
    exact = side // 2
    steps = (far.clamp(min=1).float() / exact).log() / math.log(max_distance / exact)
    coarse = (exact + (steps * (side - exact)).long()).clamp(max=side - 1)
    return (first + torch.where(far < exact, far, coarse)).int()
