"""Compressed tables of visited blocks, from rectangles of blocks.

    rectangle (head, row, row end, column, column end), int64 [n, 5]: rows from `row` up to but not
    including `row end` see the columns likewise; one that ends before it begins is empty

On the CPU by csrc/native/block_lists.cpp; elsewhere, and without kernels, by whole-tensor
operations on the places of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyops.ops.library import native

__all__ = [
    "BlockTables",
    "both_ways",
    "check_pairs",
    "check_rectangles",
    "check_sizes",
    "not_later",
    "rectangles_of",
    "tables_of",
]

_BLOCK_MULTIPLE = 16


class BlockTables(NamedTuple):
    """One direction of a layout."""

    counts: Tensor
    indices: Tensor
    full: Tensor


def check_sizes(block: int, num_queries: int, num_keys: int) -> None:
    """Refuse a block or a length that no layout can have.

    Args:
        block: Tokens of a block's side.
        num_queries: Queries, in tokens.
        num_keys: Keys, in tokens.

    Raises:
        ValueError: When the block is no multiple of 16 or a length is negative.
    """
    if block < _BLOCK_MULTIPLE or block % _BLOCK_MULTIPLE:
        raise ValueError(
            f"block is {block}; it must be a multiple of {_BLOCK_MULTIPLE}, such as 64"
        )
    for name, length in (("num_queries", num_queries), ("num_keys", num_keys)):
        if length < 0:
            raise ValueError(f"{name} is {length}; it must be a number of tokens, 0 or more")


def check_pairs(pairs: Tensor, limits: tuple[int, int, int]) -> None:
    """Refuse pairs that are not int64 [n, 3] of (head, query block, key block) below `limits`."""
    if limits[0] < 1:
        raise ValueError(f"num_heads is {limits[0]}; it must be 1 or more")
    if pairs.dtype != torch.int64:
        raise TypeError(f"pairs of blocks must be torch.int64, got {pairs.dtype}")
    if pairs.dim() != 2 or pairs.shape[1] != 3:
        raise ValueError(
            f"pairs of blocks have the shape {list(pairs.shape)}; expected [n, 3] of head, query "
            "block and key block"
        )
    if not pairs.shape[0]:
        return
    lowest, highest = (each.tolist() for each in torch.aminmax(pairs, dim=0))
    for name, low, high, limit in zip(
        ("head", "query block", "key block"), lowest, highest, limits, strict=True
    ):
        if low < 0 or high >= limit:
            raise ValueError(
                f"{name} {low if low < 0 else high} of a layout with {limit}; it must be 0 or more "
                f"and less than {limit}"
            )


def check_rectangles(rectangles: Tensor, limits: tuple[int, int, int]) -> None:
    """Refuse rectangles that are not int64 [n, 5] of (head, row, row end, column, column end) of a
    layout of `limits`, (heads, rows, columns)."""
    if limits[0] < 1:
        raise ValueError(f"num_heads is {limits[0]}; it must be 1 or more")
    if rectangles.dtype != torch.int64:
        raise TypeError(f"rectangles of blocks must be torch.int64, got {rectangles.dtype}")
    if rectangles.dim() != 2 or rectangles.shape[1] != 5:
        raise ValueError(
            f"rectangles of blocks have the shape {list(rectangles.shape)}; expected [n, 5] of "
            "head, query block, its end, key block and its end"
        )
    if not rectangles.shape[0]:
        return
    lowest, highest = (each.tolist() for each in torch.aminmax(rectangles, dim=0))
    heads, rows, columns = limits
    for name, low, high, most in zip(
        ("head", "query block", "end of query blocks", "key block", "end of key blocks"),
        lowest,
        highest,
        # An empty rectangle may begin where the blocks end
        (heads - 1, rows, rows, columns, columns),
        strict=True,
    ):
        if low < 0 or high > most:
            raise ValueError(
                f"{name} {low if low < 0 else high} of a rectangle, in a layout of {heads} heads "
                f"and {rows} x {columns} blocks; it must be 0 or more and at most {most}"
            )


def rectangles_of(pairs: Tensor) -> Tensor:
    """Blocks, int64 [n, 3] of (head, row, column), as rectangles of one block each."""
    head, row, column = pairs.unbind(1)
    return torch.stack([head, row, row + 1, column, column + 1], dim=1)


def not_later(visible: Tensor) -> Tensor:
    """Blocks of a [heads, nq, nk] that causality does not hide wholly: bool [nq, nk]."""
    rows, columns = (torch.arange(size, device=visible.device) for size in visible.shape[1:])
    return columns <= rows[:, None]


def tables_of(
    rectangles: Tensor, shape: tuple[int, int, int], whole: tuple[int, int], *, causal: bool
) -> tuple[BlockTables, BlockTables]:
    """The tables of rows and of columns.

    Args:
        rectangles: int64 [n, 5], checked; they may overlap.
        shape: (heads, rows, columns), in blocks.
        whole: (rows, columns) that have all their tokens: the first so many.
        causal: Whether blocks above the diagonal fall away, and those on it are tested inside.
    """
    module = native() if rectangles.device.type == "cpu" else None
    if module is None:
        return _by_places(_places(rectangles, shape, causal=causal), shape, whole, causal=causal)
    heads, rows, columns = shape
    rectangles = rectangles.contiguous()
    lists = module.BlockLists(
        rectangles.data_ptr(), rectangles.shape[0], heads, rows, columns, causal
    )
    by_row, by_column = (
        BlockTables(
            torch.empty(heads, lines, dtype=torch.int32, device="cpu"),
            torch.empty(heads, lines, most, dtype=torch.int32, device="cpu"),
            torch.empty(heads, lines, most, dtype=torch.bool, device="cpu"),
        )
        for lines, most in ((rows, lists.most_of_rows), (columns, lists.most_of_columns))
    )
    lists.write(*(table.data_ptr() for table in (*by_row, *by_column)), *whole)
    return by_row, by_column


def _places(rectangles: Tensor, shape: tuple[int, int, int], *, causal: bool) -> Tensor:
    """Where the blocks of rectangles lie in a flattened [heads, rows, columns], int64 [n]: once
    each, ascending."""
    _, rows, columns = shape
    head, row, row_end, column, column_end = rectangles.unbind(1)
    width = (column_end - column).clamp(min=0)
    area = width * (row_end - row).clamp(min=0)
    each = torch.arange(len(area), device=area.device).repeat_interleave(area)
    within = torch.arange(each.numel(), device=area.device) - (area.cumsum(0) - area)[each]
    row = row[each] + within // width[each]
    column = column[each] + within % width[each]
    places = (head[each] * rows + row) * columns + column
    if causal:
        places = places[column <= row]
    total = shape[0] * rows * columns
    if 16 * places.numel() < total:
        once: Tensor = torch.unique_consecutive(places.sort().values)
        return once
    # A table and a pass over it take less time than sorting
    visible = torch.zeros(total, dtype=torch.bool, device=places.device)
    visible[places] = True
    return visible.nonzero().squeeze(1)


def _by_places(
    places: Tensor, shape: tuple[int, int, int], whole: tuple[int, int], *, causal: bool
) -> tuple[BlockTables, BlockTables]:
    _, rows, columns = shape
    head_row, column = places // columns, places % columns
    turned = ((head_row // rows) * columns + column) * rows + head_row % rows
    return both_ways(places, turned.sort().values, shape, whole, causal=causal)


def both_ways(
    places: Tensor,
    turned: Tensor,
    shape: tuple[int, int, int],
    whole: tuple[int, int],
    *,
    causal: bool,
) -> tuple[BlockTables, BlockTables]:
    """The tables of rows and of columns, from the visited blocks' places in [heads, rows, columns]
    and, `turned`, in [heads, columns, rows], both ascending; the rest as for `tables_of`."""
    heads, rows, columns = shape

    def full(row: Tensor, column: Tensor) -> Tensor:
        found = (row < whole[0]) & (column < whole[1])
        return found & (column < row) if causal else found

    return (
        _compressed(places, (heads, rows, columns), full),
        _compressed(turned, (heads, columns, rows), lambda column, row: full(row, column)),
    )


def _compressed(
    keys: Tensor, shape: tuple[int, int, int], full: Callable[[Tensor, Tensor], Tensor]
) -> BlockTables:
    """Tables of visited blocks.

    Args:
        keys: int64 [n], ascending: their places in a flattened [heads, rows, columns].
        shape: (heads, rows, columns), in blocks.
        full: full(row, column) is whether the blocks, int64 [n] each, need no test inside.

    Returns:
        Counts [heads, rows], and columns and `full` [heads, rows, most], 0 behind the count.
    """
    heads, num_rows, num_columns = shape
    if not keys.numel():
        empty = torch.zeros(heads, num_rows, 1, dtype=torch.int32, device=keys.device)
        return BlockTables(empty[..., 0].clone(), empty, empty.bool())
    line = keys // num_columns
    column = keys - line * num_columns
    counts = torch.bincount(line, minlength=heads * num_rows)
    slot = torch.arange(keys.numel(), device=keys.device) - (counts.cumsum(0) - counts)[line]
    most = int(counts.max())
    place = line * most + slot
    indices = torch.zeros(heads * num_rows * most, dtype=torch.int32, device=keys.device)
    indices[place] = column.int()
    whole = torch.zeros(heads * num_rows * most, dtype=torch.bool, device=keys.device)
    whole[place] = full(line % num_rows, column)
    return BlockTables(
        counts.int().view(heads, num_rows),
        indices.view(heads, num_rows, most),
        whole.view(heads, num_rows, most),
    )
