"""Patterns of windows around the diagonal: everything, a sliding window, and Longformer's with
global blocks; with BigBird's random ones besides.

    SlidingWindow(3)      Longformer()          BigBird()
    x x . . . .           x x x x x x           x x x x x x
    x x x . . .           x x x . . .           x x x r . .
    . x x x . .           x x x x . .           x x x x . r
    . . x x x .           x . x x x .           x r x x x .
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.attention.blocks_named import check_named, named_blocks
from pyops.attention.extent import Extent
from pyops.attention.parts import (
    check_random,
    check_width,
    column_ranges,
    for_each_head,
    global_blocks,
    random_columns,
    sliding_window,
)
from pyops.attention.pattern import Pattern

__all__ = ["BigBird", "Dense", "Longformer", "SlidingWindow"]


@dataclass(frozen=True)
class Dense(Pattern):
    """Every block sees every block."""

    def visited(self, extent: Extent) -> Tensor:
        """All blocks; where causal, those up to the diagonal."""
        rows = extent.rows
        end = rows + 1 if extent.causal else torch.full_like(rows, extent.num_blocks)
        return column_ranges(torch.zeros_like(rows), end)


@dataclass(frozen=True)
class SlidingWindow(Pattern):
    """Each block sees the blocks next to it.

    Raises:
        ValueError: When the width is not odd.
    """

    num_sliding_window_blocks: int = 3
    """Width of the window in blocks, odd: the block itself and as many on each side."""

    def __post_init__(self) -> None:
        check_width("num_sliding_window_blocks", self.num_sliding_window_blocks)

    def visited(self, extent: Extent) -> Tensor:
        """The window of each row."""
        return sliding_window(extent.rows, self.num_sliding_window_blocks)


@dataclass(frozen=True)
class Longformer(Pattern):
    """A sliding window, and blocks that see all and are seen by all (Beltagy et al., 2020).

    Raises:
        ValueError: When the width is not odd or a global block can not be.
    """

    num_sliding_window_blocks: int = 3
    """Width of the window in blocks, odd: the block itself and as many on each side."""
    global_block_indices: tuple[int, ...] = (0,)
    """The global blocks, or where ranges of them begin."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Where the ranges end, one behind their last block; None: each index is one block."""

    def __post_init__(self) -> None:
        check_width("num_sliding_window_blocks", self.num_sliding_window_blocks)
        check_named(self.global_block_indices, self.global_block_end_indices)

    def check(self, num_blocks: int) -> None:
        """See `Pattern.check`."""
        named_blocks(self.global_block_indices, self.global_block_end_indices, num_blocks)

    def visited(self, extent: Extent) -> Tensor:
        """Window, global columns and global rows."""
        chosen = named_blocks(
            self.global_block_indices,
            self.global_block_end_indices,
            extent.num_blocks,
            cut=extent.begins,
        )
        return torch.cat(
            [
                sliding_window(extent.rows, self.num_sliding_window_blocks),
                global_blocks(chosen, extent.num_blocks, horizontal=True),
            ]
        )


@dataclass(frozen=True)
class BigBird(Pattern):
    """A sliding window, the first blocks global, and random blocks (Zaheer et al., 2020).

    Raises:
        ValueError: When the width is not odd or a number is negative.
    """

    num_random_blocks: int = 1
    """Different random columns of each row, out of all, or where causal out of those up to its own;
    they may fall on blocks that are seen anyway."""
    num_sliding_window_blocks: int = 3
    """Width of the window in blocks, odd: the block itself and as many on each side."""
    num_global_blocks: int = 1
    """The first so many rows and columns are visited wholly."""
    different_layout_per_head: bool = False
    """Whether each head draws its own random blocks; else all have those of head 0."""
    seed: int = 0
    """Of the random blocks: the same on every rank."""

    def __post_init__(self) -> None:
        check_width("num_sliding_window_blocks", self.num_sliding_window_blocks)
        for name in ("num_random_blocks", "num_global_blocks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")

    @property
    def differs_by_head(self) -> bool:
        """Whether random blocks differ."""
        return self.different_layout_per_head and self.num_random_blocks > 0

    def check(self, num_blocks: int) -> None:
        """See `Pattern.check`."""
        check_random(self.num_random_blocks, num_blocks)

    def visited(self, extent: Extent) -> Tensor:
        """Window, global blocks and random blocks."""
        if not extent.begins:
            self.check(extent.num_blocks)
        first = range(min(self.num_global_blocks, extent.num_blocks))
        alike = torch.cat(
            [
                sliding_window(extent.rows, self.num_sliding_window_blocks),
                global_blocks(first, extent.num_blocks, horizontal=True),
            ]
        )
        drawn = random_columns(self.seed, "bigbird", count=self.num_random_blocks, extent=extent)
        return torch.cat([for_each_head(alike, extent.num_heads), drawn])
