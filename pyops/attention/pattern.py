"""Pattern: a rule which blocks of keys a block of queries sees, for any length; its union with
others, and a rule given as a function.

    pattern = BigBird(seed=1) | Longformer(global_block_indices=(0, 8))
    layout = pattern.layout(65536, heads=16, causal=True)      # every rank: the same, no message
    layout = pattern.layout(65536, heads=4, first_head=8)      # the rank that holds heads 8 to 11

A layout is built for the length that is asked for, from a list of rectangles of blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from pyops.attention.extent import Extent
from pyops.attention.parts import for_each_head
from pyops.attention.picture import draw
from pyops.ops.attention import BlockLayout
from pyops.ops.attention.block_tables import rectangles_of

__all__ = ["BlockFunction", "Pattern", "PatternUnion", "from_mask_function"]


class Pattern(ABC):
    """Which blocks see which. Frozen: equal parameters give equal layouts on every rank."""

    @property
    def differs_by_head(self) -> bool:
        """Whether heads see different blocks; else one table serves them all."""
        return False

    @abstractmethod
    def visited(self, extent: Extent) -> Tensor:
        """The visited blocks, as rectangles int64 [n, 5] of (head, query block, its end, key block,
        its end), in any order, which may overlap; ends are one behind the last block, and heads are
        counted from 0 within `extent`, only 0 where all are alike."""

    def check(self, num_blocks: int) -> None:  # noqa: B027  # most patterns refuse none
        """Refuse a length that the pattern can not have, before anything is built.

        Args:
            num_blocks: The length in blocks.

        Raises:
            ValueError: When the pattern names blocks that the length does not have.
        """

    def layout(
        self,
        length: int,
        *,
        heads: int,
        block: int = 64,
        causal: bool = False,
        first_head: int = 0,
        begins: bool = False,
    ) -> BlockLayout:
        """The layout of self-attention over `length` tokens.

        Args:
            length: Tokens of queries and of keys; the last block may have fewer than `block`.
            heads: Heads that the caller holds.
            block: Tokens of a block's side, a multiple of 16.
            causal: Whether no query sees a later key, to the token.
            first_head: Where the caller's heads begin among all heads.
            begins: Of causal attention: the tokens are the beginning of a longer sequence, of whose
                layout, however long it is, these are the first rows. So a token sees the same keys
                whatever follows it; and blocks that the pattern names further on are no error.

        Returns:
            The layout on the CPU, of `heads` heads, or of one where all heads are alike.

        Raises:
            ValueError: When a number is out of range, or the pattern names blocks that `length`
                does not have.
        """
        if heads < 1 or first_head < 0:
            raise ValueError(
                f"heads {heads} from head {first_head} on; give 1 or more, from 0 or more on"
            )
        if block < 1 or length < 0:
            raise ValueError(
                f"a length of {length} in blocks of {block} tokens; give 0 or more, and a multiple "
                "of 16"
            )
        if begins and not causal:
            raise ValueError(
                "begins is True, but causal is not: a token that sees what follows it depends on "
                "the length; leave begins out"
            )
        num_heads = heads if self.differs_by_head else 1
        extent = Extent(
            -(-length // block),
            first_head if self.differs_by_head else 0,
            num_heads,
            causal,
            begins,
        )
        return BlockLayout.from_rectangles(
            self.visited(extent),
            num_heads=num_heads,
            block=block,
            num_queries=length,
            num_keys=length,
            causal=causal,
        )

    def __or__(self, other: Pattern) -> PatternUnion:
        """The pattern that visits what one of both visits."""
        parts = [
            part
            for each in (self, other)
            for part in (each.parts if isinstance(each, PatternUnion) else (each,))
        ]
        return PatternUnion(tuple(parts))

    def draw(
        self,
        path: Path | str,
        *,
        num_blocks: int = 16,
        heads: int = 1,
        causal: bool = False,
        title: str | None = None,
    ) -> Path:
        """Write a picture of the pattern, an svg: rows are blocks of queries, columns blocks of
        keys.

        Args:
            path: The file, which ends with .svg.
            num_blocks: Blocks of each side.
            heads: Heads side by side, where they differ.
            causal: As for `layout`.
            title: Above the picture.

        Returns:
            The path.
        """
        layout = self.layout(16 * num_blocks, heads=heads, block=16, causal=causal)
        return draw(layout, path, title=title or type(self).__name__)


@dataclass(frozen=True)
class PatternUnion(Pattern):
    """What at least one of `parts` visits; made by `a | b`."""

    parts: tuple[Pattern, ...]

    @property
    def differs_by_head(self) -> bool:
        """Whether those of one part do."""
        return any(part.differs_by_head for part in self.parts)

    def check(self, num_blocks: int) -> None:
        """As of each part."""
        for part in self.parts:
            part.check(num_blocks)

    def visited(self, extent: Extent) -> Tensor:
        """The blocks of all parts, one after the other."""
        alike = replace(extent, first_head=0, num_heads=1)
        return torch.cat(
            [
                part.visited(extent)
                if part.differs_by_head
                else for_each_head(part.visited(alike), extent.num_heads)
                for part in self.parts
            ]
        )

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))


@dataclass(frozen=True)
class BlockFunction(Pattern):
    """A rule given as a function of the blocks' numbers; made by `from_mask_function`."""

    function: Callable[[Tensor, Tensor, Tensor], Tensor]
    different_layout_per_head: bool = False

    @property
    def differs_by_head(self) -> bool:
        """Whether the function is asked for each head."""
        return self.different_layout_per_head

    def visited(self, extent: Extent) -> Tensor:
        """Where the function says so, of all blocks."""
        heads = extent.first_head + torch.arange(extent.num_heads, device="cpu")
        rows = extent.rows
        seen = self.function(heads[:, None, None], rows[None, :, None], rows[None, None, :])
        if seen.dtype != torch.bool:
            raise TypeError(
                f"the function of a pattern returned {seen.dtype}; it must return torch.bool"
            )
        size = extent.num_blocks
        return rectangles_of(seen.expand(extent.num_heads, size, size).nonzero())


def from_mask_function(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], *, different_layout_per_head: bool = False
) -> BlockFunction:
    """A pattern from a function that says which blocks see which.

    Blocks are seen whole. What is decided token by token (causality, a window, documents) is told
    to the operation instead, which does it without a table of tokens.

    Args:
        function: function(head, query_block, key_block) -> bool tensor, of int64 tensors that
            broadcast to [heads, n, n]; heads are numbered as in the whole model.
        different_layout_per_head: Whether the result depends on the head; else it is asked for head
            0 alone.
    """
    return BlockFunction(function, different_layout_per_head)
