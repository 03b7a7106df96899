"""quantize_rows, row_extents, scale_product and scale_sums_ for CUDA: one launch each. A row stays
in registers between the pass that finds its scale and the one that uses it; a wider one is read
again from the cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.codes.scaled import check_rows, check_sums
from pyops.ops.triton.activation import _act
from pyops.ops.triton.launch import dense, last_dim_first, on_device, tile

__all__ = ["quantize_rows", "row_extents", "scale_product", "scale_sums_"]

WIDEST = 8192  # numbers of a row in registers
ROWS, COLUMNS = 4, 512  # of a tile of sums


def quantize_rows(
    x: Tensor, scales: Tensor | None, zero_points: Tensor | None, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales, and zero points or [0]."""
    check_rows("quantize_rows", x, scales, zero_points, symmetric)
    x, rows, _ = last_dim_first(x)
    codes = x.new_empty(x.shape, dtype=torch.int8 if symmetric else torch.uint8)
    found = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    zeros = x.new_zeros([0] if symmetric else x.shape[:-1], dtype=torch.int32)
    given, given_zeros = dense(scales), dense(zero_points)
    if rows:
        stride = 0 if given is None or given.numel() == 1 else 1
        tensors = (x, given, given_zeros, codes, found, found, zeros)
        _launch(tensors, x, rows, symmetric, GIVEN=given is not None, STRIDE=stride, CODES=True)
    return codes, found, zeros


def row_extents(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Least and greatest."""
    check_rows("row_extents", x, None, None, symmetric)
    x, rows, _ = last_dim_first(x)
    lowest = x.new_zeros(x.shape[:-1], dtype=torch.float32)
    highest = torch.zeros_like(lowest)
    if rows:
        tensors = (x, None, None, x, lowest, highest, x)
        _launch(tensors, x, rows, symmetric, GIVEN=False, STRIDE=0, CODES=False)
    return lowest, highest


def _launch(tensors, x, rows, symmetric, **constants):
    columns = x.shape[-1]
    block = tile(columns, most=WIDEST)
    with on_device(x):
        _rows[(rows,)](
            *tensors,
            columns,
            SYMMETRIC=symmetric,
            BLOCK=block,
            CHUNKS=triton.cdiv(columns, block),
            num_warps=min(max(block // 512, 1), 16),
            enable_fp_fusion=False,  # every operation is rounded once, as on the CPU
            **constants,
        )


def scale_product(
    acc: Tensor, *operands: Any, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """act(s (acc - z sums) t + bias). `operands`: row_scales, column_scales, row_zeros, sums,
    bias."""
    row_scales, column_scales, row_zeros, sums, bias = operands
    check_sums(acc, row_scales, column_scales, row_zeros, sums, bias, activation, dtype)
    acc = last_dim_first(acc)[0]
    y = acc.new_empty(acc.shape, dtype=dtype)
    _launch_scale(acc, y, operands, activation)
    return y


def scale_sums_(acc: Tensor, *operands: Any) -> None:
    """s (acc - z sums) t + bias as fp32 in the place of acc, whose tiles are read before they are
    written. `operands`: as of `scale_product`."""
    row_scales, column_scales, row_zeros, sums, bias = operands
    check_sums(acc, row_scales, column_scales, row_zeros, sums, bias, None, torch.float32)
    place = acc.contiguous()
    _launch_scale(place, place.view(torch.float32), operands, None)
    if place is not acc:
        acc.copy_(place)


def _launch_scale(
    acc: Tensor, y: Tensor, operands: tuple[Any, ...], activation: str | None
) -> None:
    row_scales, _, row_zeros, _, bias = operands
    _, rows, columns = last_dim_first(acc)
    if rows:
        width = tile(columns, most=COLUMNS)
        with on_device(acc):
            _scale[(triton.cdiv(rows, ROWS), triton.cdiv(columns, width))](
                acc,
                *map(dense, operands),
                y,
                rows,
                columns,
                STRIDE=0 if row_scales.numel() == 1 else 1,
                ZEROS=row_zeros is not None,
                HAS_BIAS=bias is not None,
                ACTIVATION=activation,
                ROWS=ROWS,
                COLUMNS=width,
                enable_fp_fusion=False,
            )


@triton.jit
def _ordered(x):
    """Bits as an integer in the order of the numbers; the same again gives them back."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _whole(t):
    """To the nearest whole number, half to even; |t| < 2^22."""
    return (t + 12582912.0) - 12582912.0


@triton.jit
def _range(bottom, top, given, given_zeros, place, SYMMETRIC: tl.constexpr, GIVEN: tl.constexpr):
    """Scale and zero point of a row whose numbers lie from bottom to top, or those given; nan and 0
    where bottom and top are nan."""
    zero = tl.zeros_like(top)
    if GIVEN:
        scale = tl.where(top == top, tl.load(given + place), top)
        if not SYMMETRIC:
            zero = tl.where(scale > 0.0, tl.load(given_zeros + place).to(tl.float32), 0.0)
    elif SYMMETRIC:
        scale = tl.div_rn(top, 127.0)
    else:
        scale = tl.div_rn(top - bottom, 255.0)
        scale = tl.where(scale < float("inf"), scale, float("nan"))
        ratio = tl.div_rn(-bottom, tl.where(scale > 0.0, scale, 1.0))
        zero = tl.where(scale > 0.0, _whole(tl.where(ratio < 255.0, ratio, 255.0)), 0.0)
    return scale, zero


@triton.jit
def _code(value, scale, zero, SYMMETRIC: tl.constexpr):
    """Codes of numbers by a scale and zero point, as whole numbers."""
    ratio = tl.div_rn(value, tl.zeros_like(value) + tl.where(scale > 0.0, scale, 1.0))
    ratio = tl.where(ratio > -511.0, tl.where(ratio < 511.0, ratio, 511.0), -511.0)
    code = _whole(ratio) + zero
    if SYMMETRIC:
        code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    else:
        code = tl.minimum(tl.maximum(code, 0.0), 255.0)
    return tl.where(scale > 0.0, code, 0.0).to(tl.int32)


@triton.jit
def _rows(
    x,
    given,
    given_zeros,
    codes,
    scales,
    highest,
    zeros,
    columns,
    SYMMETRIC: tl.constexpr,
    GIVEN: tl.constexpr,
    STRIDE: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start, column = row * columns, tl.arange(0, BLOCK)
    value = tl.load(x + start + column, mask=column < columns, other=0.0).to(tl.float32)
    low = tl.minimum(tl.min(_ordered(value), axis=0), 0)
    high = tl.maximum(tl.max(_ordered(tl.abs(value) if SYMMETRIC else value), axis=0), 0)
    for k in tl.static_range(1, CHUNKS):
        at = k * BLOCK + column
        more = tl.load(x + start + at, mask=at < columns, other=0.0).to(tl.float32)
        low = tl.minimum(low, tl.min(_ordered(more), axis=0))
        high = tl.maximum(high, tl.max(_ordered(tl.abs(more) if SYMMETRIC else more), axis=0))
    # Beyond the largest finite number, on either side, stand inf and nan
    bad = (high >= 0x7F800000) | (low <= -0x7F800001)
    top = tl.where(bad, float("nan"), _number(high))
    bottom = tl.where(bad, float("nan"), _number(low))
    if not CODES:
        tl.store(scales + row, -top if SYMMETRIC else bottom)
        tl.store(highest + row, top)
    else:
        scale, zero = _range(bottom, top, given, given_zeros, row * STRIDE, SYMMETRIC, GIVEN)
        tl.store(scales + row, scale)
        if not SYMMETRIC:
            tl.store(zeros + row, zero.to(tl.int32))
        for k in tl.static_range(CHUNKS):
            at = k * BLOCK + column
            if k > 0:
                value = tl.load(x + start + at, mask=at < columns, other=0.0).to(tl.float32)
            code = _code(value, scale, zero, SYMMETRIC)
            tl.store(codes + start + at, code.to(codes.dtype.element_ty), mask=at < columns)


@triton.jit
def _scale(
    acc,
    row_scales,
    column_scales,
    row_zeros,
    sums,
    bias,
    y,
    rows,
    columns,
    STRIDE: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    valid, within = row < rows, column < columns
    inside = valid[:, None] & within[None, :]
    at = row[:, None] * columns + column[None, :]
    total = tl.load(acc + at, mask=inside, other=0)
    if ZEROS:
        zero = tl.load(row_zeros + row * STRIDE, mask=valid, other=0)
        total -= zero[:, None] * tl.load(sums + column, mask=within, other=0)[None, :]
    scale = tl.load(row_scales + row * STRIDE, mask=valid, other=0.0)
    of_column = tl.load(column_scales + column, mask=within, other=0.0)
    value = total.to(tl.float32) * scale[:, None] * of_column[None, :]
    if HAS_BIAS:
        value += tl.load(bias + column, mask=within, other=0.0)[None, :]
    if ACTIVATION is not None:
        value, _ = _act(value, ACTIVATION, y.dtype.element_ty)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
