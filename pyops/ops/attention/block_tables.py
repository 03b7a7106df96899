"""Compressed tables of visited blocks: built by whole-tensor operations from their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BlockTables", "check_pairs", "check_sizes", "compressed", "not_later"]

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


def not_later(visible: Tensor) -> Tensor:
    """Blocks of a [heads, nq, nk] that causality does not hide wholly: bool [nq, nk]."""
    rows, columns = (torch.arange(size, device=visible.device) for size in visible.shape[1:])
    return columns <= rows[:, None]


def compressed(
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
