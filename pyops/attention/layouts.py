"""PatternLayouts: the layouts that a layer of attention asks for, one for each length, kept.

    layouts = PatternLayouts(BigBird(), heads=4, first_head=8, causal=True)
    layouts.of(1024, device)           of a whole sequence
    layouts.last_query(1025, device)   of one query that follows 1024 tokens
    layouts.rows(1024, 1100, device)   of the blocks of queries from token 1024 on

Layers that are alike share what is built.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pyops.attention.pattern import Pattern
from pyops.ops.attention import BlockLayout
from pyops.ops.attention.block_tables import check_sizes
from pyops.torch_private import constant_in_graphs, disable_dynamo

__all__ = ["PatternLayouts", "shared_layouts"]

KEPT = 64  # layouts of a pattern, and patterns that layers share


_NUMBERS = itertools.count()
_BY_NUMBER: weakref.WeakValueDictionary[int, PatternLayouts] = weakref.WeakValueDictionary()


@constant_in_graphs
def _widths(number: int, length: int) -> tuple[int, int, int]:
    """Heads, and the widths of the tables of rows and of columns."""
    built = _BY_NUMBER[number].build(length)
    return built.num_heads, built.indices.shape[2], built.column_indices.shape[2]


@constant_in_graphs
def _packed(number: int, length: int, device: str) -> Tensor:
    """int32 [n], all tables one after the other."""
    built = _BY_NUMBER[number].build(length, device)
    rows = (built.counts, built.indices, built.full)
    columns = (built.column_counts, built.column_indices, built.column_full)
    return torch.cat([table.int().reshape(-1) for table in (*rows, *columns)])


@dataclass(frozen=True)
class PatternLayouts:
    """The layouts of a pattern for some heads. To a program of torch.compile what is kept is an
    input; a length that is new while it is traced is a constant of it.

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
    number: int = field(default_factory=_NUMBERS.__next__, init=False, compare=False, repr=False)
    """By which a program that is traced names this object."""

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Pattern):
            raise TypeError(
                f"pattern is {self.pattern!r}; give a pattern of pyops.attention, such as BigBird()"
            )
        check_sizes(self.block, 0, 0)
        _BY_NUMBER[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, also one in another process, has its own number."""
        given = (self.pattern, self.heads, self.first_head, self.block, self.causal)
        return PatternLayouts, given

    def of(self, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """The layout of a sequence.

        Args:
            length: Tokens of queries and of keys.
            device: Of its tables.
        """
        device = torch.device(device)
        found = self.kept.get((length, device))
        if found is not None:
            return found
        if torch.compiler.is_compiling():
            return self._traced(operator.index(length), device)
        if len(self.kept) >= KEPT:
            self.kept.clear()
        self.kept[length, device] = built = self.build(length, device)
        return built

    def build(self, length: int, device: torch.device | str = "cpu") -> BlockLayout:
        """As `of`, made anew.

        Args:
            length: Tokens of queries and of keys.
            device: Of its tables.
        """
        return self.pattern.layout(
            length,
            heads=self.heads,
            block=self.block,
            causal=self.causal,
            first_head=self.first_head,
            begins=self.causal,
        ).to(device)

    def _traced(self, length: int, device: torch.device) -> BlockLayout:
        """From constants of the program that is traced: torch takes a tensor or numbers for one,
        but no object that holds them."""
        number, blocks = operator.index(self.number), -(-length // self.block)
        heads, *widths = _widths(number, length)
        lines = heads * blocks
        sizes = [n for most in widths for n in (lines, lines * most, lines * most)]
        parts = iter(_packed(number, length, str(device)).split(sizes))
        tables = [
            table
            for most in widths
            for table in (
                next(parts).view(heads, blocks),
                next(parts).view(heads, blocks, most),
                next(parts).view(heads, blocks, most).bool(),
            )
        ]
        return BlockLayout(self.block, length, length, self.causal, *tables)

    @disable_dynamo
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

    @disable_dynamo
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
