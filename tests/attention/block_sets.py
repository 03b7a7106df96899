"""The table of the patterns' rules, stated again as sets of (row, column): no tensors, and nothing
of the package but the uniform numbers that random blocks are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyops.attention import (
    BigBird,
    Dense,
    Fixed,
    Longformer,
    Pattern,
    SlidingWindow,
    Variable,
)
from pyops.random import uniform

__all__ = ["Blocks", "blocks_of"]

Blocks = set[tuple[int, int]]


def where(n: int, rule: Callable[[int, int], bool]) -> Blocks:
    return {(row, column) for row in range(n) for column in range(n) if rule(row, column)}


def window(n: int, width: int) -> Blocks:
    return where(n, lambda row, column: 2 * abs(row - column) <= width - 1)


def chosen(first: Sequence[int], end: Sequence[int] | None) -> set[int]:
    if end is None:
        return set(first)
    return {b for start, stop in zip(first, end, strict=True) for b in range(start, stop)}


def drawn(name: str, seed: int, count: int, head: int, n: int, *, causal: bool) -> Blocks:
    """Of each row as many columns as asked for, taken one after the other out of those left."""
    found = set()
    for row in range(n):
        place = (head * 2**24 + row) * count
        numbers = uniform(seed, name, (count,), offset=place).tolist() if count else []
        left = list(range(row + 1 if causal else n))
        for number in numbers:
            if left:
                found.add((row, left.pop(int(number * len(left)))))
    return found


def fixed(pattern: Fixed, head: int, n: int) -> Blocks:
    width, g = pattern.num_local_blocks, pattern.num_global_blocks
    number = head % pattern.num_different_global_patterns
    columns: set[int] = set()
    for start in range(0, n, width):
        column = start + width - (number + 1) * g
        if start + width > n:  # a window that is cut short
            column = max(0, min(column, n - g))
        columns |= set(range(column, min(column + g, n)))
    return where(
        n,
        lambda row, column: (
            row // width == column // width
            or column in columns
            or (pattern.horizontal_global_attention and row in columns)
        ),
    )


def variable(pattern: Variable, n: int) -> Blocks:
    number_of: list[int] = []
    widths = list(pattern.local_window_blocks)
    for number in range(n):
        number_of += [number] * (widths[number] if number < len(widths) else widths[-1])
    named = chosen(pattern.global_block_indices, pattern.global_block_end_indices)
    return where(
        n,
        lambda row, column: (
            number_of[row] == number_of[column]
            or column in named
            or (pattern.horizontal_global_attention and row in named)
        ),
    )


def both_ways(n: int, named: set[int]) -> Blocks:
    return where(n, lambda row, column: row in named or column in named)


def blocks_of(pattern: Pattern, head: int, n: int, *, causal: bool) -> Blocks:
    """What a head sees of n x n blocks."""
    if not pattern.differs_by_head:
        head = 0
    if isinstance(pattern, Dense):
        found = where(n, lambda row, column: True)
    elif isinstance(pattern, Fixed):
        found = fixed(pattern, head, n)
    elif isinstance(pattern, Variable):
        found = variable(pattern, n) | drawn(
            "variable", pattern.seed, pattern.num_random_blocks, head, n, causal=causal
        )
    elif isinstance(pattern, BigBird):
        found = window(n, pattern.num_sliding_window_blocks)
        found |= both_ways(n, set(range(pattern.num_global_blocks)))
        found |= drawn("bigbird", pattern.seed, pattern.num_random_blocks, head, n, causal=causal)
    elif isinstance(pattern, Longformer):
        named = chosen(pattern.global_block_indices, pattern.global_block_end_indices)
        found = window(n, pattern.num_sliding_window_blocks) | both_ways(n, named)
    else:
        assert isinstance(pattern, SlidingWindow)
        found = window(n, pattern.num_sliding_window_blocks)
    return {(row, column) for row, column in found if column <= row or not causal}
