"""Patterns of windows side by side: of one width (Fixed), or of listed widths (Variable), with some
columns that all rows see.

    Fixed(num_local_blocks=4)      x x x x . . . x
                                   x x x x . . . x
                                   x x x x . . . x
                                   x x x x . . . x
                                   . . . x x x x x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.attention.blocks_named import check_named, named_blocks
from pyops.attention.extent import Extent
from pyops.attention.parts import (
    check_random,
    column_ranges,
    for_each_head,
    global_blocks,
    random_columns,
)
from pyops.attention.pattern import Pattern

__all__ = ["Fixed", "Variable"]


@dataclass(frozen=True)
class Fixed(Pattern):
    """Windows of one width side by side, and of each window some columns that all rows see (the
    "fixed" pattern of Child et al., 2019).

    Raises:
        ValueError: When a number is less than 1, or they do not divide.
    """

    num_local_blocks: int = 4
    """Blocks of a window; within it all see each other."""
    num_global_blocks: int = 1
    """Columns of each window that all rows see: its last ones, or with several patterns by head
    those before. It divides `num_local_blocks`."""
    horizontal_global_attention: bool = False
    """Whether these blocks as rows see all columns, too."""
    num_different_global_patterns: int = 1
    """Head h takes the columns of number h modulo this, counted from the window's end."""

    def __post_init__(self) -> None:
        for name in ("num_local_blocks", "num_global_blocks", "num_different_global_patterns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        local, chosen = self.num_local_blocks, self.num_global_blocks
        if local % chosen:
            raise ValueError(
                f"num_local_blocks is {local} and num_global_blocks {chosen}; the second must "
                "divide the first"
            )
        if self.num_different_global_patterns > local // chosen:
            raise ValueError(
                f"num_different_global_patterns is {self.num_different_global_patterns}, but a "
                f"window of {local} blocks has only {local // chosen} times {chosen} global blocks"
            )

    @property
    def differs_by_head(self) -> bool:
        """Whether there are several patterns of global columns."""
        return self.num_different_global_patterns > 1

    def global_columns(self, head: int, num_blocks: int) -> list[int]:
        """The columns that all rows of a head see, ascending.

        A last window that is cut short has its own, moved to the left until they exist.
        """
        local, chosen = self.num_local_blocks, self.num_global_blocks
        within = local - (1 + head % self.num_different_global_patterns) * chosen
        starts = list(range(within, num_blocks - num_blocks % local, local))
        if num_blocks % local:
            last = num_blocks - num_blocks % local + within
            starts.append(max(0, min(last, num_blocks - chosen)))
        return sorted(
            {c for start in starts for c in range(start, min(start + chosen, num_blocks))}
        )

    def visited(self, extent: Extent) -> Tensor:
        """Windows, and the global columns of each head."""
        start = extent.rows // self.num_local_blocks * self.num_local_blocks
        end = (start + self.num_local_blocks).clamp(max=extent.num_blocks)
        parts = [for_each_head(column_ranges(start, end), extent.num_heads)]
        local, size = self.num_local_blocks, extent.num_blocks
        # In a longer sequence the last window is not cut short.
        whole = -(-size // local) * local if extent.begins else size
        for head in range(extent.num_heads):
            parts.append(
                global_blocks(
                    [c for c in self.global_columns(extent.first_head + head, whole) if c < size],
                    size,
                    horizontal=self.horizontal_global_attention,
                    head=head,
                )
            )
        return torch.cat(parts)


@dataclass(frozen=True)
class Variable(Pattern):
    """Windows of listed widths side by side, global blocks, and random blocks.

    Raises:
        ValueError: When a number is out of range, or a global block can not be.
    """

    num_random_blocks: int = 0
    """Different random columns of each row, out of all, or where causal out of those up to its
    own."""
    local_window_blocks: tuple[int, ...] = (4,)
    """Widths of the windows in their order; the last one repeats to the end."""
    global_block_indices: tuple[int, ...] = (0,)
    """Columns that all rows see, or where ranges of them begin."""
    global_block_end_indices: tuple[int, ...] | None = None
    """Where the ranges end, one behind their last block; None: each index is one block."""
    horizontal_global_attention: bool = False
    """Whether these blocks as rows see all columns, too."""
    different_layout_per_head: bool = False
    """Whether each head draws its own random blocks; else all have those of head 0."""
    seed: int = 0
    """Of the random blocks: the same on every rank."""

    def __post_init__(self) -> None:
        if self.num_random_blocks < 0:
            raise ValueError(f"num_random_blocks is {self.num_random_blocks}; it must be >= 0")
        if not self.local_window_blocks or min(self.local_window_blocks) < 1:
            raise ValueError(
                f"local_window_blocks is {self.local_window_blocks}; give one width or more, each "
                "of 1 or more blocks"
            )
        check_named(self.global_block_indices, self.global_block_end_indices)

    @property
    def differs_by_head(self) -> bool:
        """Whether random blocks differ."""
        return self.different_layout_per_head and self.num_random_blocks > 0

    def check(self, num_blocks: int) -> None:
        """See `Pattern.check`."""
        check_random(self.num_random_blocks, num_blocks)
        named_blocks(self.global_block_indices, self.global_block_end_indices, num_blocks)

    def visited(self, extent: Extent) -> Tensor:
        """Windows, global blocks and random blocks."""
        size = extent.num_blocks
        if not extent.begins:
            self.check(size)
        widths = torch.tensor(self.local_window_blocks, device="cpu")
        repeats = max(0, -(-(size - int(widths.sum())) // int(widths[-1])))
        ends = torch.cat([widths, widths[-1:].expand(repeats)]).cumsum(0)
        window = torch.searchsorted(ends, extent.rows, right=True)
        start = torch.cat([ends.new_zeros(1), ends])[window]
        chosen = named_blocks(
            self.global_block_indices, self.global_block_end_indices, size, cut=extent.begins
        )
        alike = torch.cat(
            [
                column_ranges(start, ends[window].clamp(max=size)),
                global_blocks(chosen, size, horizontal=self.horizontal_global_attention),
            ]
        )
        drawn = random_columns(self.seed, "variable", count=self.num_random_blocks, extent=extent)
        return torch.cat([for_each_head(alike, extent.num_heads), drawn])
