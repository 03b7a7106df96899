"""PatternLayouts: the layouts that a layer of attention asks for, one for each length, kept.

layouts = PatternLayouts(BigBird(), heads=4, first_head=8, causal=True)
layouts.of(1024, device)           of a whole sequence
layouts.last_query(1025, device)   of one query that follows 1024 tokens
layouts.rows(1024, 1100, device)   of the blocks of queries from token 1024 on
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from pyops.attention.pattern import Pattern
from pyops.ops.attention import BlockLayout
from pyops.ops.attention.block_tables import check_sizes

__all__ = ["PatternLayouts", "shared_layouts"]

KEPT = 64  # layouts of a pattern, and patterns that layers share


@dataclass(frozen=True)
class PatternLayouts:
    """The layouts of a pattern for some heads. To a program of torch.compile what is kept is an
    input; a new length is built outside of it.

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

    kept: dict[tuple[int, torch.device], BlockLayout] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """What was built, by length and device."""

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
        device = torch.device(device)
        found = self.kept.get((length, device))
        return self._build(length, device) if found is None else found

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _build(self, length: int, device: torch.device) -> BlockLayout:
        if len(self.kept) >= KEPT:
            self.kept.clear()
        built = self.pattern.layout(
            length,
            heads=self.heads,
            block=self.block,
            causal=self.causal,
            first_head=self.first_head,
            begins=self.causal,
        ).to(device)
        self.kept[length, device] = built
        return built

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def last_query(self, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """The layout of the last token of a sequence alone, whose keys are all of it.

        Args:
            length: Tokens of keys; the query is the last of them.
            device: Of its tables.
        """
        row = (length - 1) // self.block
        # Of the whole block, so that it is one for all lengths that end in it.
        whole = self.of((row + 1) * self.block, "cpu")
        visible = torch.zeros(whole.num_heads, 1, row + 1, dtype=torch.bool, device="cpu")
        slots = torch.arange(whole.indices.shape[2], device="cpu") < whole.counts[:, row, None]
        head, slot = slots.nonzero().unbind(1)
        visible[head, 0, whole.indices[head, row, slot].long()] = True
        return BlockLayout.from_dense(visible, block=self.block, num_queries=1, num_keys=length).to(
            device
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        visible = self.of(length, "cpu").dense()[:, first // self.block :]
        return BlockLayout.from_dense(
            visible, block=self.block, num_queries=length - first, num_keys=length
        ).to(device)


@functools.lru_cache(maxsize=KEPT)
def shared_layouts(
    pattern: Pattern, heads: int, first_head: int, block: int, causal: bool
) -> PatternLayouts:
    """The `PatternLayouts` of these fields: the same object for layers that are alike, so that each
    layout is built once."""
    return PatternLayouts(pattern, heads, first_head, block, causal)
