"""fake_quantize for CUDA: one launch forward, one backward, whose partial sums for the scales are
added in a fixed order.

[outer, channels, inner] as a matrix: inner > 1   rows that share a scale, the sums along them
                                      inner = 1   columns that do, the sums down them
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.layers.fake_quantize import check_fake_quantize, check_gradient
from pyops.ops.triton.launch import computed_in, dense, on_device, tile

__all__ = ["fake_quantize", "fake_quantize_backward"]

NUMBERS = 4096  # of a tile
COLUMNS = 1024
MOST_TILES = 256  # of a column of tiles: as many partial sums for each scale at most


def fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    lo: int,
    hi: int,
    inner: int,
    factor: float,
) -> Tensor:
    """y = s clamp(round(x / s), lo - z, hi - z)."""
    check_fake_quantize(x, scale, zero, lo, hi, inner)
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(_forward, (x, y), x, scale, zero, lo, hi, inner)
    return y


def fake_quantize_backward(
    dy: Tensor,
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    *,
    lo: int,
    hi: int,
    inner: int,
    factor: float,
    input_grad: bool,
    scale_grad: bool,
) -> tuple[Tensor, Tensor]:
    """dx and ds, or [0]."""
    check_fake_quantize(x, scale, zero, lo, hi, inner)
    check_gradient(dy, x)
    x, dy, channels = x.contiguous(), dy.contiguous(), scale.numel()
    dx = torch.empty_like(x) if input_grad else x.new_empty(0)
    if not x.numel():
        return dx, torch.zeros_like(scale) if scale_grad else scale.new_empty(0)
    rows, columns, row_tile, width, each = _shape(x, channels, inner)
    down, across = triton.cdiv(rows, row_tile * each), triton.cdiv(columns, width)
    partial = scale.new_empty((down * row_tile, across) if inner > 1 else (down, columns))
    _launch(
        _backward,
        (dy, x, dx, partial),
        x,
        scale,
        zero,
        lo,
        hi,
        inner,
        INPUT_GRAD=input_grad,
        SCALE_GRAD=scale_grad,
    )
    if not scale_grad:
        return dx, scale.new_empty(0)
    sums = partial.double()
    if inner > 1:
        sums = sums[:rows].sum(1).view(-1, channels)
    return dx, (sums.sum(0) * factor).to(scale.dtype).view(scale.shape)


def _shape(x: Tensor, channels: int, inner: int) -> tuple[int, int, int, int, int]:
    """Rows and columns of the matrix, those of a tile, and the tiles that a program goes down."""
    columns = inner if inner > 1 else channels
    rows = x.numel() // columns
    width = tile(columns, most=COLUMNS)
    row_tile = min(NUMBERS // width, triton.next_power_of_2(rows))
    each = 1 if inner > 1 else triton.cdiv(triton.cdiv(rows, row_tile), MOST_TILES)
    return rows, columns, row_tile, width, each


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    lo: int,
    hi: int,
    inner: int,
    **constants: bool,
) -> None:
    if not x.numel():
        return
    rows, columns, row_tile, width, each = _shape(x, scale.numel(), inner)
    grid = (triton.cdiv(rows, row_tile * each) * triton.cdiv(columns, width),)
    with on_device(x):
        kernel[grid](
            *tensors,
            dense(scale),
            dense(zero),
            rows,
            columns,
            scale.numel(),
            float(lo),
            float(hi),
            each,
            BY_ROW=inner > 1,
            HAS_ZERO=zero is not None,
            C=computed_in(x),
            ROWS=row_tile,
            COLUMNS=width,
            **constants,
        )


@triton.jit
def _place(rows, columns, down, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of the matrix: its rows and columns, where its numbers are, and which are there."""
    across = tl.cdiv(columns, COLUMNS)
    row = down.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return row, column, row[:, None] * columns + column[None, :], inside


@triton.jit
def _of_channel(values, row, column, channels, BY_ROW: tl.constexpr):
    """A number for each row, or for each column, to broadcast over the tile."""
    if BY_ROW:
        found = tl.load(values + row % channels)[:, None]
    else:
        found = tl.load(values + column, mask=column < channels, other=0.0)[None, :]
    return found


@triton.jit
def _steps(a, s, low, high, C: tl.constexpr):
    """x / s and its nearest whole number, kept within one beyond the range; a nan stays."""
    one = tl.where(s > 0.0, s, 1.0)
    v = a / one if tl.float64 == C else tl.div_rn(a, one + tl.zeros_like(a))
    v = tl.where(s > 0.0, v, 0.0)
    near = tl.where(v < low - 1.0, low - 1.0, v)
    near = tl.where(near > high + 1.0, high + 1.0, near)
    shift = 6755399441055744.0 if tl.float64 == C else 12582912.0  # 1.5 2^52, 1.5 2^23
    return v, (near + shift) - shift


@triton.jit
def _ends(zero, row, column, channels, lo, hi, HAS_ZERO: tl.constexpr, BY_ROW: tl.constexpr, s):
    """The ends of the range, less the zero points, of the shape of s."""
    z = tl.zeros_like(s)
    if HAS_ZERO:
        z = _of_channel(zero, row, column, channels, BY_ROW)
    return lo - z, hi - z


@triton.jit
def _forward(
    x,
    y,
    scale,
    zero,
    rows,
    columns,
    channels,
    lo,
    hi,
    each,
    BY_ROW: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    down = tl.program_id(0) // tl.cdiv(columns, COLUMNS)
    tl.assume(each > 0)
    for t in range(0, each):
        row, column, at, inside = _place(rows, columns, down * each + t, ROWS, COLUMNS)
        s = _of_channel(scale, row, column, channels, BY_ROW)
        low, high = _ends(zero, row, column, channels, lo, hi, HAS_ZERO, BY_ROW, s)
        a = tl.load(x + at, mask=inside, other=0.0).to(C)
        _, q = _steps(a, s, low, high, C)
        q = tl.where(q < low, low, q)
        q = tl.where(q > high, high, q)
        tl.store(y + at, (q * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    dy,
    x,
    dx,
    partial,
    scale,
    zero,
    rows,
    columns,
    channels,
    lo,
    hi,
    each,
    BY_ROW: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUT_GRAD: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
):
    across = tl.cdiv(columns, COLUMNS)
    down = tl.program_id(0) // across
    total = tl.zeros([ROWS, COLUMNS], dtype=C)
    tl.assume(each > 0)
    for t in range(0, each):
        row, column, at, inside = _place(rows, columns, down * each + t, ROWS, COLUMNS)
        s = _of_channel(scale, row, column, channels, BY_ROW)
        low, high = _ends(zero, row, column, channels, lo, hi, HAS_ZERO, BY_ROW, s)
        g = tl.load(dy + at, mask=inside, other=0.0).to(C)
        a = tl.load(x + at, mask=inside, other=0.0).to(C)
        v, q = _steps(a, s, low, high, C)
        if INPUT_GRAD:
            straight = tl.where((q < low) | (q > high), 0.0, g)
            tl.store(dx + at, straight.to(dx.dtype.element_ty), mask=inside)
        if SCALE_GRAD:
            slope = tl.where(q < low, low, tl.where(q > high, high, q - v))
            total += tl.where(inside, g * slope, 0.0)
    if SCALE_GRAD:
        if BY_ROW:
            row, column, at, inside = _place(rows, columns, down, ROWS, COLUMNS)
            tl.store(partial + row * across + tl.program_id(0) % across, tl.sum(total, axis=1))
        else:
            row, column, at, inside = _place(rows, columns, down, ROWS, COLUMNS)
            place = partial + down.to(tl.int64) * columns + column
            tl.store(place, tl.sum(total, axis=0), mask=column < columns)
