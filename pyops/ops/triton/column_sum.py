"""The second half of a bias or weight gradient: partial sums of row blocks, added in their order.

kernel of the op:  block k of rows  -->  partial[k, columns]  fp32
column_sum:        out[j] = partial[0, j] + partial[1, j] + ...
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.launch import on_device

__all__ = ["column_sum", "row_blocks"]

MOST_BLOCKS = 256  # about two for each multiprocessor: partial sums stay small beside what was read


def row_blocks(rows: int, *, block: int) -> tuple[int, int]:
    """(number of blocks, tiles of `block` rows in each): at most MOST_BLOCKS, by the number of rows alone."""
    tiles = triton.cdiv(rows, block)
    each = max(1, triton.cdiv(tiles, MOST_BLOCKS))
    return triton.cdiv(tiles, each), each


def column_sum(partial: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[blocks, columns] -> [columns] in `dtype`, the blocks in order."""
    blocks, columns = partial.shape
    out = partial.new_empty(columns, dtype=dtype)
    if columns:
        with on_device(partial):
            _column_sum[(triton.cdiv(columns, 128),)](partial, out, blocks, columns, BLOCK=128)
    return out


@triton.jit
def _column_sum(partial, out, blocks, columns, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=partial.dtype.element_ty)
    for k in range(0, blocks):
        total += tl.load(partial + k * columns + column, mask=column < columns, other=0.0)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=column < columns)
