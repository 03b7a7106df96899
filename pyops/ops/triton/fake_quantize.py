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
    x: Tensor, scale: Tensor, zero: Tensor | None, *, factor: float, **places: int
) -> Tensor:
    """y = s clamp(round(x / s), lo - z, hi - z). `places`: lo, hi and inner."""
    check_fake_quantize(x, scale, zero, **places)
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(None, (x, scale, zero), y, None, **places)
    return y


def fake_quantize_backward(
    dy: Tensor, *operands: Any, factor: float, input_grad: bool, scale_grad: bool, **places: int
) -> tuple[Tensor, Tensor]:
    """dx and ds, or [0]. `operands`: x, scale, zero; `places`: as forward."""
    x, scale, zero = operands
    check_fake_quantize(x, scale, zero, **places)
    check_gradient(dy, x)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x) if input_grad else None
    ds = scale.new_zeros(scale.shape if scale_grad else [0])
    if x.numel() and (input_grad or scale_grad):
        grid = _Grid(x, scale.numel(), places["inner"])
        partial = scale.new_empty(grid.partial) if scale_grad else None
        _launch(dy, (x, scale, zero), dx, partial, **places)
        if partial is not None:
            sums = partial.double()
            if places["inner"] > 1:
                sums = sums[: grid.rows].sum(1).view(-1, scale.numel())
            ds = (sums.sum(0) * factor).to(scale.dtype).view(scale.shape)
    return x.new_empty(0) if dx is None else dx, ds


class _Grid:
    """The matrix that [outer, channels, inner] is, its tiles, and the tiles `each` that a program
    goes down."""

    def __init__(self, x: Tensor, channels: int, inner: int) -> None:
        self.columns = inner if inner > 1 else channels
        self.rows = x.numel() // self.columns
        self.width = tile(self.columns, most=COLUMNS)
        self.height = min(NUMBERS // self.width, triton.next_power_of_2(self.rows))
        self.each = 1
        if inner == 1:
            self.each = triton.cdiv(triton.cdiv(self.rows, self.height), MOST_TILES)
        self.down = triton.cdiv(self.rows, self.height * self.each)
        self.across = triton.cdiv(self.columns, self.width)
        self.partial = (
            (self.down * self.height, self.across) if inner > 1 else (self.down, self.columns)
        )


def _launch(
    dy: Tensor | None,
    operands: tuple[Tensor, Tensor, Tensor | None],
    out: Tensor | None,
    partial: Tensor | None,
    *,
    lo: int,
    hi: int,
    inner: int,
) -> None:
    x, scale, zero = operands
    if not x.numel():
        return
    grid = _Grid(x, scale.numel(), inner)
    with on_device(x):
        _rounded[(grid.down * grid.across,)](
            dy,
            x,
            out,
            partial,
            dense(scale),
            dense(zero),
            grid.rows,
            grid.columns,
            scale.numel(),
            float(lo),
            float(hi),
            grid.each,
            BY_ROW=inner > 1,
            HAS_ZERO=zero is not None,
            C=computed_in(x),
            ROWS=grid.height,
            COLUMNS=grid.width,
            FORWARD=dy is None,
            HAS_OUT=out is not None,
            SCALE_GRAD=partial is not None,
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
def _rounded(
    dy,
    x,
    out,
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
    FORWARD: tl.constexpr,
    HAS_OUT: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
):
    """y forward; backward dx and the sums for the scales."""
    across = tl.cdiv(columns, COLUMNS)
    down = tl.program_id(0) // across
    total = tl.zeros([ROWS, COLUMNS], dtype=C)
    tl.assume(each > 0)
    for t in range(0, each):
        row, column, at, inside = _place(rows, columns, down * each + t, ROWS, COLUMNS)
        s = _of_channel(scale, row, column, channels, BY_ROW)
        low, high = _ends(zero, row, column, channels, lo, hi, HAS_ZERO, BY_ROW, s)
        a = tl.load(x + at, mask=inside, other=0.0).to(C)
        v, q = _steps(a, s, low, high, C)
        if FORWARD:
            within = tl.where(q < low, low, q)
            y = tl.where(within > high, high, within) * s
            tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)
        else:
            g = tl.load(dy + at, mask=inside, other=0.0).to(C)
            if HAS_OUT:
                straight = tl.where((q < low) | (q > high), 0.0, g)
                tl.store(out + at, straight.to(out.dtype.element_ty), mask=inside)
            if SCALE_GRAD:
                slope = tl.where(q < low, low, tl.where(q > high, high, q - v))
                total += tl.where(inside, g * slope, 0.0)
    if SCALE_GRAD:
        row, column, at, inside = _place(rows, columns, down, ROWS, COLUMNS)
        if BY_ROW:
            tl.store(partial + row * across + tl.program_id(0) % across, tl.sum(total, axis=1))
        else:
            place = partial + down.to(tl.int64) * columns + column
            tl.store(place, tl.sum(total, axis=0), mask=column < columns)
