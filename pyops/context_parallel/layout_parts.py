"""The blocks of a layout between the tokens that ranks hold.

    layout of 8 x 8 blocks      queries of rank 0, zigzag on 2:     and, of the ring, the part of
    # . . . . . . .             blocks 0 1 6 7                      keys 2 3 4 5
    # # . . . . . .                 # . . . . . . .                     . . . .
    # # # . . . . .                 # # . . . . . .                     . . . .
    # . # # . . . .                 # . . . . # # .                     . . . #
    ...                             # . . . . . # #                     . . . .

Stretches of tokens are made of whole blocks; where they are not, blocks are cut into smaller ones,
of a multiple of 16 tokens. What is found is kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from pyops.ops.attention import BlockLayout

__all__ = ["common_block", "layout_of_heads", "layout_part"]

LEAST = 16  # tokens of a block, see BlockLayout
KEPT = 256  # parts


@lru_cache(maxsize=KEPT)
def layout_of_heads(layout: BlockLayout, start: int, stop: int) -> BlockLayout:
    """The layout of query heads [start, stop)."""
    return layout.heads(start, stop - start)


@lru_cache(maxsize=KEPT)
def _fits(places: Tensor, block: int) -> bool:
    """Whether tokens at these places are whole blocks of so many, each in its order."""
    if len(places) % block:
        return False
    stretches = places.view(-1, block)
    first = stretches[:, :1]
    within = torch.arange(block, device=places.device)
    return bool((first % block == 0).all()) and bool((stretches == first + within).all())


def common_block(block: int, places: Iterable[Tensor]) -> int | None:
    """Tokens of the largest blocks that those of a layout can be cut into, and of which all of
    these stretches of tokens are made; None: there are none.

    Args:
        block: Tokens of a block's side.
        places: int64 [n] each.
    """
    every = list(places)
    for size in range(block, 0, -LEAST):
        if block % size == 0 and all(_fits(each, size) for each in every):
            return size
    return None


@lru_cache(maxsize=KEPT)
def layout_part(layout: BlockLayout, queries: Tensor, keys: Tensor, *, causal: bool) -> BlockLayout:
    """The layout of the queries at these places, and the keys at those; causality is left to the
    operation, which is told the places.

    Args:
        layout: Of whole rows.
        queries: int64 [n].
        keys: int64 [m].
        causal: Whether blocks that are wholly later than the query fall away.

    Raises:
        ValueError: The places are no whole blocks.
    """
    block = common_block(layout.block, (queries, keys))
    if block is None:
        raise ValueError(
            f"stretches of {len(queries)} queries and {len(keys)} keys are not made of blocks of "
            f"a multiple of {LEAST} tokens that {layout.block} is one of"
        )
    row, column = queries[::block], keys[::block]
    rows, columns = (each.to(layout.device) // layout.block for each in (row, column))
    visible = layout.dense().index_select(1, rows).index_select(2, columns)
    if causal:
        visible &= (column < row[:, None] + block).to(visible.device)
    return BlockLayout.from_dense(
        visible, block=block, num_queries=len(queries), num_keys=len(keys)
    )
