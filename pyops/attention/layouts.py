"""PatternLayouts: the layouts that a layer of attention asks for, one for each length, kept.

layouts = PatternLayouts(BigBird(), heads=4, first_head=8, causal=True)
layouts.of(1024, device)           of a whole sequence
layouts.last_query(1025, device)   of one query that follows 1024 tokens
layouts.rows(1024, 1100, device)   of the blocks of queries from token 1024 on
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.attention.pattern import Pattern
from pyops.ops.attention import BlockLayout
from pyops.ops.attention.block_tables import check_sizes

__all__ = ["PatternLayouts"]

KEPT = 64  # layouts of a process, those of all layers that are alike being one


@dataclass(frozen=True)
class PatternLayouts:
    """The layouts of a pattern for some heads.

    Layers with equal fields share what is built.

    Raises:
        ValueError: The block is no multiple of 16, or a number is out of range.
    """

    pattern: Pattern
    """Which blocks see which."""
    heads: int
    """Heads of the layer, on this rank."""
    first_head: int = 0
    """Where they begin in the whole model."""
    block: int = 64
    """Tokens of a block's side."""
    causal: bool = False
    """Whether no query sees a later key. A sequence then has the first rows of the layout of any
    longer one, so that a token sees the same keys whatever follows it."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(
                f"pattern is {self.pattern!r}; give a pattern of pyops.attention, such as BigBird()"
            )
        check_sizes(self.block, 0, 0)

    def of(self, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """The layout of a sequence.

        Args:
            length: Tokens of queries and of keys.
            device: Of its tables.
        """
        return _built(self, length, torch.device(device))

    def last_query(self, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """The layout of the last token of a sequence alone, whose keys are all of it.

        Args:
            length: Tokens of keys; the query is the last of them.
            device: Of its tables.
        """
        return _last(self, length, torch.device(device))

    def rows(self, first: int, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """The layout of the last tokens of a sequence, whose keys are all of it; causality is left
        to the operation, which is told their places.

        Args:
            first: The first of these queries, a multiple of `block`.
            length: Tokens of keys.
            device: Of its tables.
        """
        if first % self.block or not 0 <= first < length:
            raise ValueError(
                f"queries from token {first} on of {length}; give a multiple of block = "
                f"{self.block}, 0 or more and before the end"
            )
        return _rows(self, first, length, torch.device(device))


def _rows(layouts: PatternLayouts, first: int, length: int, device: torch.device) -> BlockLayout:
    whole = _kept(layouts, length, torch.device("cpu"))
    visible = whole.dense()[:, first // layouts.block :]
    return BlockLayout.from_dense(
        visible, block=layouts.block, num_queries=length - first, num_keys=length
    ).to(device)


def _built(layouts: PatternLayouts, length: int, device: torch.device) -> BlockLayout:
    return _kept(layouts, length, device)


def _last(layouts: PatternLayouts, length: int, device: torch.device) -> BlockLayout:
    row = (length - 1) // layouts.block
    return BlockLayout.from_dense(
        _row(layouts, row, device), block=layouts.block, num_queries=1, num_keys=length
    )


@functools.lru_cache(maxsize=KEPT)
def _kept(layouts: PatternLayouts, length: int, device: torch.device) -> BlockLayout:
    return layouts.pattern.layout(
        length,
        heads=layouts.heads,
        block=layouts.block,
        causal=layouts.causal,
        first_head=layouts.first_head,
        begins=layouts.causal,
    ).to(device)


@functools.lru_cache(maxsize=KEPT)
def _row(layouts: PatternLayouts, row: int, device: torch.device) -> Tensor:
    """bool [heads or 1, 1, row + 1]: the blocks that this row of blocks sees, up to its own, of a
    sequence that ends with it."""
    length = (row + 1) * layouts.block
    return _kept(layouts, length, torch.device("cpu")).dense()[:, row:].to(device)
