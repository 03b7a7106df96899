"""bias_activation and bias_gated for CUDA: one launch forward, two backward (the second adds
partial bias gradients)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.layers.activation import check_gradient, check_layer
from pyops.ops.triton.column_sum import column_sum, row_blocks
from pyops.ops.triton.launch import computed_in, dense, last_dim_first, on_device, tile

__all__ = ["bias_activation", "bias_activation_backward", "bias_gated", "bias_gated_backward"]

ROWS, COLUMNS = 4, 512  # of a tile


def bias_activation(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """y = act(x + bias)."""
    check_layer("bias_activation", x, bias, activation)
    x, rows, columns = last_dim_first(x)
    bias = dense(bias)
    y = torch.empty_like(x)
    _launch(_forward, (x, bias, y), x, rows, columns, activation, HAS_BIAS=bias is not None)
    return y


def bias_gated(x: Tensor, bias: Tensor | None, *, activation: str) -> Tensor:
    """y = act(gate + bias_gate) * (up + bias_up)."""
    check_layer("bias_gated", x, bias, activation)
    x, rows, columns = last_dim_first(x)
    bias = dense(bias)
    y = x.new_empty([*x.shape[:-1], columns // 2])
    _launch(
        _gated_forward, (x, bias, y), x, rows, columns // 2, activation, HAS_BIAS=bias is not None
    )
    return y


def bias_activation_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx, and dbias or [0]."""
    check_gradient("bias_activation", dy, x, bias, activation)
    return _gradients(_backward, dy, x, bias, x.shape[-1], activation, bias_grad)


def bias_gated_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, *, activation: str, bias_grad: bool
) -> tuple[Tensor, Tensor]:
    """dx = dgate | dup, and dbias or [0]."""
    check_gradient("bias_gated", dy, x, bias, activation)
    return _gradients(_gated_backward, dy, x, bias, x.shape[-1] // 2, activation, bias_grad)


def _gradients(kernel, dy, x, bias, columns, activation, bias_grad):
    x, rows, width = last_dim_first(x)
    dx, dy, bias = torch.empty_like(x), dy.contiguous(), dense(bias)
    blocks, tiles = row_blocks(rows, block=ROWS)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    partial = x.new_empty((blocks, width) if bias_grad else 0, dtype=wide)
    _launch(
        kernel,
        (dy, x, bias, dx, partial),
        x,
        blocks,
        columns,
        activation,
        row_tile=1,
        num_rows=rows,
        tiles=tiles,
        maxnreg=80 if wide == torch.float32 else None,  # six CTAs and not now and then four
        HAS_BIAS=bias is not None,
        BIAS_GRAD=bias_grad,
    )
    return dx, column_sum(partial, dtype=x.dtype) if bias_grad else x.new_empty(0)


def _launch(
    kernel, tensors, x, rows, columns, activation, *, row_tile=ROWS, num_rows=None, **constants
):
    if not rows or not columns:
        return
    width = tile(columns, most=COLUMNS)
    grid = (triton.cdiv(rows, row_tile) * triton.cdiv(columns, width),)
    with on_device(x):
        kernel[grid](
            *tensors,
            rows if num_rows is None else num_rows,
            columns,
            ACTIVATION=activation,
            C=computed_in(x),
            ROWS=ROWS,
            COLUMNS=width,
            **constants,
        )


@triton.jit
def _act(z, ACTIVATION: tl.constexpr):
    """act(z) and act'(z); what is not used is not computed."""
    if ACTIVATION == "gelu":
        cumulative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
        value = z * cumulative
        slope = cumulative + z * (tl.exp(-0.5 * z * z) * 0.3989422804014327)
    elif ACTIVATION == "gelu_tanh":
        near = tl.minimum(tl.maximum(z, -40.0), 40.0)  # beyond: 0 and 1, and z^3 can't overflow
        near = tl.where(z != z, z, near)  # minimum and maximum give the number beside a nan
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * near * (1.0 + 0.044715 * near * near)))
        value = z * s
        slope = s + near * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * near * near)
    elif ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        value = z * s
        slope = s * (1.0 + z * (1.0 - s))
    else:
        value = tl.where(z > 0.0, z, tl.where(z != z, z, 0.0))
        slope = tl.where(z <= 0.0, 0.0, 1.0)
    return value, slope


@triton.jit
def _place(columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's tile: rows first, then columns, in one dimension of the grid."""
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64)
    return row, (program % across) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _plus(x, bias, at, column, inside, columns, HAS_BIAS: tl.constexpr, C: tl.constexpr):
    """x[at] + bias[column], wide."""
    z = tl.load(x + at, mask=inside, other=0.0).to(C)
    if HAS_BIAS:
        z += tl.load(bias + column, mask=column < columns, other=0.0).to(C)[None, :]
    return z


@triton.jit
def _forward(
    x,
    bias,
    y,
    rows,
    columns,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    first, column = _place(columns, ROWS, COLUMNS)
    row = first * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value, _ = _act(_plus(x, bias, at, column, inside, columns, HAS_BIAS, C), ACTIVATION)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_forward(
    x,
    bias,
    y,
    rows,
    columns,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    first, column = _place(columns, ROWS, COLUMNS)
    row = first * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * (2 * columns) + column[None, :]
    gate, _ = _act(_plus(x, bias, at, column, inside, columns, HAS_BIAS, C), ACTIVATION)
    up = _plus(
        x + columns, bias + columns if HAS_BIAS else bias, at, column, inside, columns, HAS_BIAS, C
    )
    tl.store(
        y + row[:, None] * columns + column[None, :],
        (gate * up).to(y.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _backward(
    dy,
    x,
    bias,
    dx,
    partial,
    rows,
    columns,
    tiles,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
):
    block, column = _place(columns, ROWS, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=C)
    tl.assume(tiles > 0)
    for t in range(0, tiles):
        row = (block * tiles + t) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        gradient = tl.load(dy + at, mask=inside, other=0.0).to(
            C
        )  # before the arithmetic, which it would wait behind
        _, slope = _act(_plus(x, bias, at, column, inside, columns, HAS_BIAS, C), ACTIVATION)
        gradient *= slope
        tl.store(dx + at, gradient.to(dx.dtype.element_ty), mask=inside)
        total += gradient
    if BIAS_GRAD:
        tl.store(partial + block * columns + column, tl.sum(total, axis=0), mask=column < columns)


@triton.jit
def _gated_backward(
    dy,
    x,
    bias,
    dx,
    partial,
    rows,
    columns,
    tiles,
    ACTIVATION: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
):
    block, column = _place(columns, ROWS, COLUMNS)
    gates, ups = tl.zeros([ROWS, COLUMNS], dtype=C), tl.zeros([ROWS, COLUMNS], dtype=C)
    tl.assume(tiles > 0)
    for t in range(0, tiles):
        row = (block * tiles + t) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * (2 * columns) + column[None, :]
        gradient = tl.load(
            dy + row[:, None] * columns + column[None, :], mask=inside, other=0.0
        ).to(C)
        up = _plus(
            x + columns,
            bias + columns if HAS_BIAS else bias,
            at,
            column,
            inside,
            columns,
            HAS_BIAS,
            C,
        )
        value, slope = _act(_plus(x, bias, at, column, inside, columns, HAS_BIAS, C), ACTIVATION)
        dgate, dup = gradient * up * slope, gradient * value
        tl.store(dx + at, dgate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + columns, dup.to(dx.dtype.element_ty), mask=inside)
        gates += dgate
        ups += dup
    if BIAS_GRAD:
        target = partial + block * (2 * columns) + column
        tl.store(target, tl.sum(gates, axis=0), mask=column < columns)
        tl.store(target + columns, tl.sum(ups, axis=0), mask=column < columns)
