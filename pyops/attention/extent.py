"""Extent: how many blocks, and which heads, a pattern is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Extent"]


@dataclass(frozen=True)
class Extent:
    """The size of the layout that a pattern fills."""

    num_blocks: int
    """Blocks of queries, and of keys."""
    first_head: int
    """The first head, as numbered in the whole model."""
    num_heads: int
    """Heads from there on."""
    causal: bool
    """Whether blocks above the diagonal will fall away."""
    begins: bool = False
    """Whether this is the beginning of a longer sequence, and its rows are those of the longer
    one's layout; blocks that only this one has are then named by nothing."""

    @property
    def rows(self) -> Tensor:
        """The blocks' numbers, int64 [num_blocks]."""
        return torch.arange(self.num_blocks, device="cpu")
