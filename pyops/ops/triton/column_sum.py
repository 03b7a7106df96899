"""The second half of a bias or weight gradient: partial sums of row blocks, added in a fixed order.

kernel of the op:  block k of rows  -->  partial[k, columns]  fp32
column_sum:        out[j] = the sum of partial[k, j], in an order that depends on the number of
                   blocks alone
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.launch import on_device

__all__ = ["column_sum", "row_blocks"]

ROWS, COLUMNS = 64, 32  # of a tile: 4096 columns are 128 programs, and 256 blocks four turns
MOST_BLOCKS = 256  # about two for each multiprocessor: partial sums stay small beside what was read


def row_blocks(rows: int, *, block: int) -> tuple[int, int]:
    """(number of blocks, tiles of `block` rows in each): at most MOST_BLOCKS, by the number of rows
    alone."""
    tiles = triton.cdiv(rows, block)
    each = max(1, triton.cdiv(tiles, MOST_BLOCKS))
    return triton.cdiv(tiles, each), each


def column_sum(partial: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[blocks, columns] -> [columns] in `dtype`, in an order that the number of blocks alone
    decides."""
    blocks, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    if columns:
        with on_device(partial):
            _column_sum[(triton.cdiv(columns, COLUMNS),)](
                partial,
                out,
                blocks,
                columns,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
            )
    return out


@triton.jit
def _column_sum(partial, out, blocks, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=partial.dtype.element_ty)
    for t in tl.range(0, tl.cdiv(blocks, ROWS), loop_unroll_factor=4):
        block = t * ROWS + tl.arange(0, ROWS)
        inside = (block < blocks)[:, None] & (column < columns)[None, :]
        total += tl.load(
            partial + block[:, None] * columns + column[None, :], mask=inside, other=0.0
        )
    tl.store(out + column, tl.sum(total, axis=0).to(out.dtype.element_ty), mask=column < columns)
