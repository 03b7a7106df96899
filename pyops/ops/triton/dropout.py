"""bias_dropout_add, its derivative, and dropout for CUDA: Philox words in registers, four elements
to a block of the stream.

    global index   offset + (i // row) * row_stride + i % row  =  4 * block + skip + lane
    a tile         [BLOCKS, 4]: elements from a multiple of four of the row, so that accesses are
                   whole

An element is kept where (word >> 8) / 2^24 >= p in fp32, which whole numbers decide as well: word
>> 8 >= ceil(2^24 p). Where the row's global index is no multiple of four, skip > 0, the words of
four elements come from two blocks.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.layers.dropout import (
    check_bias_dropout_add,
    check_bias_grad,
    check_dropout,
    check_stream,
)
from pyops.ops.triton.column_sum import column_sum, row_blocks
from pyops.ops.triton.launch import computed_in, dense, last_dim_first, on_device

__all__ = ["bias_dropout_add", "bias_dropout_add_backward", "dropout"]

BLOCKS = 512  # of four elements, in a tile


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, state: Tensor | None, *, p: float
) -> Tensor:
    """residual + keep / (1 - p) * (x + bias)."""
    check_bias_dropout_add(x, bias, residual, state, p)
    n = max(x.numel(), 1)
    return _apply(x, bias, residual, state, p=p, row=n, row_stride=n)


def dropout(x: Tensor, state: Tensor, *, p: float, row: int, row_stride: int) -> Tensor:
    """keep / (1 - p) * x."""
    check_dropout(x, state, p, row, row_stride)
    return _apply(x, None, None, state, p=p, row=row, row_stride=row_stride)


def bias_dropout_add_backward(
    dy: Tensor, state: Tensor | None, *, p: float, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx, [0] when nothing is dropped; dbias, the sum of dx as it was rounded, or [0]."""
    check_stream("bias_dropout_add_backward", dy, p, state)
    check_bias_grad(dy, bias_grad)
    n = max(dy.numel(), 1)
    drops = state is not None and p > 0.0
    dx = _apply(dy, None, None, state, p=p, row=n, row_stride=n) if drops else dy.new_empty(0)
    if not bias_grad:
        return dx, dy.new_empty(0)
    source, rows, columns = last_dim_first(dx if drops else dy)
    blocks, tiles = row_blocks(rows, block=ROWS)
    partial = source.new_empty(
        (blocks, columns), dtype=torch.float64 if dy.dtype == torch.float64 else torch.float32
    )
    if source.numel():
        with on_device(source):
            _sum_rows[(blocks * triton.cdiv(columns, COLUMNS),)](
                source,
                partial,
                rows,
                columns,
                tiles,
                C=computed_in(source),
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                maxnreg=REGISTERS.get(source.element_size()),
            )
    return dx, column_sum(partial, dtype=dy.dtype)


ROWS, COLUMNS = 16, 128  # of a tile of the sum
REGISTERS = {2: 40}  # by bytes of a number: twelve CTAs, where Triton 3.6 else takes a few more


def _apply(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    state: Tensor | None,
    *,
    p: float,
    row: int,
    row_stride: int,
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    n, drops = x.numel(), state is not None and p > 0.0
    if not n:
        return out
    row = min(row, n)
    lines, across = triton.cdiv(n, row), triton.cdiv(row, 4 * BLOCKS)
    columns = 1 if bias is None else bias.shape[0]
    with on_device(x):
        _combine[(lines * across,)](
            x,
            dense(bias),
            dense(residual),
            dense(state),
            out,
            n,
            row,
            row_stride,
            across,
            columns,
            math.ceil(float(np.float32(p)) * 2**24),
            _bits(1.0 / (1.0 - p) if p < 1.0 else 0.0),
            C=computed_in(x),
            DROPS=drops,
            # A row begins at a multiple of four of the bias: there is one row where there is one.
            BY_FOUR=columns % 4 == 0,
            BLOCKS=BLOCKS,
        )
    return out


def _bits(x: float) -> int:
    """A float64 as a whole number: a kernel's argument that is a float has 32 bits only."""
    return struct.unpack("<q", struct.pack("<d", x))[0]


@triton.jit
def _round(c0, c1, c2, c3, k0, k1):
    """One round of Philox4x32 (csrc/math/philox.h)."""
    high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
    high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
    return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0


@triton.jit
def _words(key, block):
    """The four words of each int64 block under the int64 key."""
    c0, c1 = (block & 0xFFFFFFFF).to(tl.uint32), ((block >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2, c3 = tl.zeros_like(c0), tl.zeros_like(c0)
    k0, k1 = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _words_from(key, index, BLOCKS: tl.constexpr):
    """The words of elements index + 4 i .. index + 4 i + 3 of the stream, i < BLOCKS."""
    block = (index >> 2) + tl.arange(0, BLOCKS)
    w0, w1, w2, w3 = _words(key, block)
    skip = index & 3
    if skip > 0:
        n0, n1, n2, _ = _words(key, block + 1)
        if skip == 1:
            w0, w1, w2, w3 = w1, w2, w3, n0
        elif skip == 2:
            w0, w1, w2, w3 = w2, w3, n0, n1
        else:
            w0, w1, w2, w3 = w3, n0, n1, n2
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["least", "scale_bits"])  # one kernel for a schedule of p
def _combine(
    x,
    bias,
    residual,
    state,
    out,
    n,
    row,
    row_stride,
    across,
    columns,
    least,
    scale_bits,
    C: tl.constexpr,
    DROPS: tl.constexpr,
    BY_FOUR: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    program = tl.program_id(0)
    line = (program // across).to(tl.int64)
    first = (program % across).to(tl.int64) * (4 * BLOCKS)  # within the row
    begin = line * row + first
    lane = tl.arange(0, 4)[None, :]
    ahead = tl.arange(0, BLOCKS)[:, None] * 4 + lane
    at = begin + ahead
    inside = (first + ahead < row) & (at < n)
    z = tl.load(x + at, mask=inside, other=0.0).to(C)
    if (
        bias is not None
    ):  # a remainder in 64 bits costs as much as the rest of the kernel: only where it must be
        column = (
            begin.to(tl.int32) % columns if begin < 0x7FFFFFFF else (begin % columns).to(tl.int32)
        )
        if BY_FOUR:  # one remainder for four numbers, which no compiler then loads one by one
            column = (column + tl.arange(0, BLOCKS) * 4) % columns
            column = tl.multiple_of(column, 4)[:, None] + lane
        else:
            column = (column + ahead) % columns
        z += tl.load(bias + column, mask=inside, other=0.0).to(C)
    if DROPS:
        # The compiler must not wait for the stream's place before it has asked for x.
        tl.debug_barrier()
        w0, w1, w2, w3 = _words_from(
            tl.load(state), tl.load(state + 1) + line * row_stride + first, BLOCKS
        )
        # Joined and not chosen by lane: Triton 3.6 else lets four threads draw each block.
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [BLOCKS, 4])
        scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
        z = tl.where((word >> 8).to(tl.int32) >= least, z * scale, 0.0)
    if residual is not None:
        z += tl.load(residual + at, mask=inside, other=0.0).to(C)
    tl.store(out + at, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows(
    x,
    partial,
    rows,
    columns,
    tiles,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    block = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=C)
    for t in tl.range(0, tiles, loop_unroll_factor=4):
        row = (block * tiles + t) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(C)
    tl.store(partial + block * columns + column, tl.sum(total, axis=0), mask=column < columns)
