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
        maxnreg={2: 96, 4: 80}.get(x.element_size()),  # five or six CTAs, not now and then four
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
def _normal_tail(a, FINE: tl.constexpr):
    """Phi(-a) and the density there, 0 <= a <= 14.3: the bell times the Mills ratio, by the
    polynomials of csrc/math/layers/activation.h."""
    v = a * a
    if FINE:  # exp(-v / 2) in two factors: a product of v alone would round away digits of it
        n = (v * -0.72134752 + 12582912.0) - 12582912.0  # 1.5 2^23: rounds to a whole number
        r = (v * -0.5 - n * 0.693359375) + n * 2.12194440e-4
        e = tl.exp2(r * 1.44269504) * tl.exp2(n)
    else:
        e = tl.exp2(v * -0.72134752)
    w = 1.0 / (a + 3.0)
    if FINE:
        m = 286.153856 * w - 291.421025
        m = m * w + 70.1957877
        m = m * w + 3.02559837
        m = m * w + 7.94888675
        m = m * w + 3.15222479
        m = m * w + 1.19792495
        m = m * w + 3.98929489e-1
    else:
        m = -38.4468233 * w + 19.3088528
        m = m * w + 7.81941892
        m = m * w + 2.92753382
        m = m * w + 1.21983586
        m = m * w + 3.98308253e-1
    return e * (w * m), e * 0.39894228


@triton.jit
def _gelu(z, FINE: tl.constexpr):
    """z Phi(z) = max(z, 0) - |z| Phi(-|z|): a small Phi keeps its digits, which 1 + erf loses."""
    a = tl.where(tl.abs(z) > 14.3, 14.3, tl.abs(z))  # beyond, the tail is 0; a nan stays
    q, density = _normal_tail(a, FINE)
    # |z|, of a large positive z its bound: an overflow does not pass for a 0.
    value = tl.where(z > 0.0, z, 0.0) - tl.where(z > 0.0, a, tl.abs(z)) * q
    rest = q - a * density  # the slope at -a
    slope = tl.where(z < 0.0, rest, 1.0 - rest)
    if FINE:  # where Phi is near 1/2: 1/2 + z p(z^2)
        v = a * a
        p = -7.66467825e-6 * v + 1.13512653e-4
        p = p * v - 1.18635306e-3
        p = p * v + 9.97333172e-3
        p = p * v - 6.6490361e-2
        p = p * v + 3.9894228e-1
        value = tl.where(a < 1.0, v * p + 0.5 * z, value)
        slope = tl.where(a < 1.0, z * (p + density) + 0.5, slope)
    return value, slope


@triton.jit
def _sigmoid(x):
    """s = 1 / (1 + exp(-x)) and 1 - s, which keeps its digits where s is close to 1."""
    e = tl.exp(-x)
    s = 1.0 / (1.0 + e)
    return s, tl.where(e > 1e38, 1e38, e) * s  # where e is infinite, s is 0


@triton.jit
def _act(z, ACTIVATION: tl.constexpr, ELEMENT: tl.constexpr, SLOPE: tl.constexpr = False):
    """act(z) and act'(z) of numbers that are stored as ELEMENT; what is not used is not computed.

    SLOPE: whether act' is what is wanted. GELU's is a difference: near its root the digits that
    fp16 can hold are lost in an approximation that is good enough for the value."""
    if ACTIVATION == "gelu":
        if tl.float64 == ELEMENT:
            cumulative = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
            value = z * cumulative
            slope = cumulative + z * (tl.exp(-0.5 * z * z) * 0.3989422804014327)
        else:
            value, slope = _gelu(z, tl.float32 == ELEMENT or (SLOPE and tl.float16 == ELEMENT))
    elif ACTIVATION == "gelu_tanh":
        near = tl.minimum(tl.maximum(z, -40.0), 40.0)  # beyond: 0 and 1, and z^3 can't overflow
        near = tl.where(z != z, z, near)  # minimum and maximum give the number beside a nan
        square = near * near
        s, rest = _sigmoid(1.5957691216057308 * near * (1.0 + 0.044715 * square))
        value = z * s
        slope = s + near * (s * rest) * 1.5957691216057308 * (1.0 + 0.134145 * square)
    elif ACTIVATION == "silu":
        s, rest = _sigmoid(z)
        value = z * s
        slope = s * (1.0 + z * rest)
    else:
        value = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
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
    z = _plus(x, bias, at, column, inside, columns, HAS_BIAS, C)
    value, _ = _act(z, ACTIVATION, x.dtype.element_ty)
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
    z = _plus(x, bias, at, column, inside, columns, HAS_BIAS, C)
    gate, _ = _act(z, ACTIVATION, x.dtype.element_ty)
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
        z = _plus(x, bias, at, column, inside, columns, HAS_BIAS, C)
        _, slope = _act(z, ACTIVATION, x.dtype.element_ty, True)
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
        z = _plus(x, bias, at, column, inside, columns, HAS_BIAS, C)
        value, slope = _act(z, ACTIVATION, x.dtype.element_ty, True)
        dgate, dup = gradient * up * slope, gradient * value
        tl.store(dx + at, dgate.to(dx.dtype.element_ty), mask=inside)
        tl.store(dx + at + columns, dup.to(dx.dtype.element_ty), mask=inside)
        gates += dgate
        ups += dup
    if BIAS_GRAD:
        target = partial + block * (2 * columns) + column
        tl.store(target, tl.sum(gates, axis=0), mask=column < columns)
        tl.store(target + columns, tl.sum(ups, axis=0), mask=column < columns)
