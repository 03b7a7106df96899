"""Layer norm and root-mean-square norm for CUDA: one launch forward; backward two, of which the
second adds the blocks' sums.

a row of up to WIDEST numbers stays in registers: read once, normalised, written once
a wider one is walked in chunks, once for each pass; its gradients of weight and bias take a launch
of their own
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.layers.norm import check_backward, check_forward
from pyops.ops.triton.column_sum import column_sum, row_blocks
from pyops.ops.triton.launch import computed_in, dense, last_dim_first, on_device, tile

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
]

WIDEST = 16384  # numbers of a row in registers
# beside them the sums over rows; twice that for RMSNorm of 16-bit numbers, which has one sum
WIDEST_SUMMED = 8192
# A CTA of such rows is alone on its multiprocessor, and would wait for the sums of a row: the next
# 16-bit row is on its way to shared memory meanwhile. With two stages it would be asked for when
# this one has been stored; wider rows would spill registers.
STAGED = 8192
TILE = 4096  # numbers that a program works on together: several rows, where they are narrow
ROWS, COLUMNS = 16, 128  # of a tile, where sums over rows take a launch of their own
# Registers of a thread of the two forward kernels that most models have, by bytes of a number and
# numbers of a tile's row. Left to itself one Triton takes a few more than another, which costs a
# CTA; one of these more or less spills, under one of them or both.
OF_RMS = {2: {4096: 32}, 4: {2048: 40, 4096: 40, 8192: 40}}
OF_ADDED_LAYER = {2: {1024: 56, 2048: 48, 4096: 48, 8192: 48}, 4: {1024: 48, 2048: 48, 4096: 48}}


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, mean, rstd."""
    y, _, mean, rstd = _forward(x, None, weight, bias, eps=eps, offset=None)
    return y, mean, rstd


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """y, rstd."""
    y, _, _, rstd = _forward(x, None, weight, None, eps=eps, offset=offset)
    return y, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, x + residual, mean, rstd."""
    return _forward(x, residual, weight, bias, eps=eps, offset=None)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, x + residual, rstd."""
    y, s, _, rstd = _forward(x, residual, weight, None, eps=eps, offset=offset)
    return y, s, rstd


def layer_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dweight, dbias."""
    return _backward(dy, dsum, x, weight, mean, rstd, offset=None, weight_grad=weight_grad)


def rms_norm_backward(
    dy: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    offset: float,
    weight_grad: bool,
) -> tuple[Tensor, Tensor]:
    """dx, dweight."""
    return _backward(dy, dsum, x, weight, rstd, rstd, offset=offset, weight_grad=weight_grad)[:2]


def _tiling(x: Tensor, columns: int, offset: float | None, *, each: int) -> dict[str, Any]:
    """Constants of the kernels that walk rows, `each` numbers a thread. offset None: layer norm,
    everywhere in this file."""
    block = tile(columns, most=WIDEST)
    rows = min(max(TILE // block, 1), 16)
    return {
        "RMS": offset is not None,
        "OFFSET": offset or 0.0,
        "C": computed_in(x),
        "ROWS": rows,
        "BLOCK": block,
        "CHUNKS": triton.cdiv(columns, block),
        "num_warps": min(max(rows * block // (32 * each), 1), 32),
    }


def _registers(x: Tensor, block: int, *, rms: bool, add: bool) -> int | None:
    """At most so many forward, None where the compiler is left to itself."""
    limits = {(True, False): OF_RMS, (False, True): OF_ADDED_LAYER}.get((rms, add), {})
    return limits.get(x.element_size(), {}).get(block)


def _forward(x, residual, weight, bias, *, eps, offset):
    check_forward([x] if residual is None else [x, residual], weight, bias)
    x, rows, columns = last_dim_first(x)
    y = x.new_empty(
        x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    )
    s = y if residual is None else torch.empty_like(y)
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=wide) for _ in range(2))
    if rows:
        residual, weight, bias = (dense(t) for t in (residual, weight, bias))
        constants = _tiling(x, columns, offset, each=16)
        with on_device(x):
            _rows_forward[(triton.cdiv(rows, constants["ROWS"]),)](
                x,
                residual,
                weight,
                bias,
                y,
                s,
                mean,
                rstd,
                rows,
                columns,
                EPS=eps,
                ADD=residual is not None,
                HAS_BIAS=bias is not None,
                maxnreg=_registers(
                    x, constants["BLOCK"], rms=offset is not None, add=residual is not None
                ),
                **constants,
            )
    return y, s, mean, rstd


def _backward(dy, dsum, x, weight, mean, rstd, *, offset, weight_grad):
    check_backward(dy, dsum, x, weight, [mean, rstd])
    x, rows, columns = last_dim_first(x)
    dx, vectors = torch.empty_like(x), 2 if offset is None else 1
    if not rows or not weight_grad:
        of_vectors = [weight.new_zeros(columns if weight_grad else 0) for _ in range(vectors)]
    if not rows:
        return dx, *of_vectors
    dy, dsum, weight, mean, rstd = (dense(t) for t in (dy, dsum, weight, mean, rstd))
    # Beyond 4096, 16 numbers a thread and their sums leave room for one CTA of 16 warps: 8 of each
    # make it 32.
    constants = _tiling(x, columns, offset, each=16 if columns <= 4096 else 8)
    widest = WIDEST_SUMMED * (2 if offset is not None and x.element_size() == 2 else 1)
    together = (
        constants["CHUNKS"] == 1 and columns <= widest
    )  # then the sums are taken while the row is there
    blocks, tiles = row_blocks(rows, block=constants["ROWS"] if together else ROWS)
    sums, narrow = weight_grad and together, x.dtype != torch.float64
    partial = x.new_empty((vectors, blocks, columns) if weight_grad else 0, dtype=rstd.dtype)
    programs = (
        blocks if sums else triton.cdiv(rows, constants["ROWS"])
    )  # without sums nothing is carried from row to row
    with on_device(x):
        _rows_backward[(programs,)](
            dy,
            dsum,
            x,
            weight,
            mean,
            rstd,
            dx,
            partial,
            rows,
            columns,
            tiles if sums else 1,
            MORE=dsum is not None,
            SUMS=sums,
            STAGES=3 if sums and constants["BLOCK"] == STAGED and x.element_size() == 2 else 1,
            # Two CTAs of 8 warps beside each other: for layer norm the compiler else takes a few
            # registers more, now and then, which halves what is in flight.
            maxnreg=128 if offset is None and narrow and constants["num_warps"] == 8 else None,
            **constants,
        )
        if weight_grad and not together:
            _columns_backward[(triton.cdiv(columns, COLUMNS), blocks)](
                dy,
                x,
                mean,
                rstd,
                partial,
                rows,
                columns,
                tiles,
                RMS=constants["RMS"],
                C=constants["C"],
                ROWS=ROWS,
                COLUMNS=COLUMNS,
            )
    if weight_grad:
        of_vectors = [column_sum(p, dtype=weight.dtype) for p in partial]
    return dx, *of_vectors


@triton.jit
def _scale(weight, column, columns, OFFSET: tl.constexpr, C: tl.constexpr):
    return (tl.load(weight + column, mask=column < columns, other=0.0).to(C) + OFFSET)[None, :]


@triton.jit
def _input(x, residual, s, at, inside, C: tl.constexpr, ADD: tl.constexpr, WRITE: tl.constexpr):
    """What is normalised: x, or the sum as it is rounded when it is written."""
    value = tl.load(x + at, mask=inside, other=0.0).to(C)
    if ADD:
        rounded = (value + tl.load(residual + at, mask=inside, other=0.0).to(C)).to(
            s.dtype.element_ty
        )
        if WRITE:
            tl.store(s + at, rounded, mask=inside)
        value = rounded.to(C)
    return value


@triton.jit
def _rows_forward(
    x,
    residual,
    weight,
    bias,
    y,
    s,
    mean,
    rstd,
    rows,
    columns,
    EPS: tl.constexpr,
    RMS: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    start, valid = (row * columns)[:, None], (row < rows)[:, None]
    inside = valid & (column < columns)[None, :]
    value = _input(x, residual, s, start + column[None, :], inside, C, ADD, True)
    # The first chunk stays in registers. With one chunk the loops below are empty, and nothing is
    # read again.
    total = value
    for k in tl.static_range(1, CHUNKS):
        at = k * BLOCK + column
        total += _input(
            x, residual, s, start + at[None, :], valid & (at < columns)[None, :], C, ADD, True
        )
    centre, shift = tl.zeros([ROWS], dtype=C), tl.zeros([ROWS], dtype=C)
    if not RMS:
        centre = tl.sum(total, axis=1) / columns
    distance = tl.where(inside, value - centre[:, None], 0.0)
    distances, squares = distance, distance * distance
    for k in tl.static_range(1, CHUNKS):
        at = k * BLOCK + column
        inner = valid & (at < columns)[None, :]
        far = tl.where(
            inner,
            _input(x, residual, s, start + at[None, :], inner, C, ADD, False) - centre[:, None],
            0.0,
        )
        distances += far
        squares += far * far
    variance = tl.sum(squares, axis=1) / columns
    if not RMS:  # what the rounded mean lacks
        shift = tl.sum(distances, axis=1) / columns
        variance = tl.maximum(variance - shift * shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    scale = 1.0 / tl.sqrt(variance + EPS)
    for k in tl.static_range(CHUNKS):
        at = k * BLOCK + column
        inner = valid & (at < columns)[None, :]
        if k > 0:
            distance = (
                _input(x, residual, s, start + at[None, :], inner, C, ADD, False) - centre[:, None]
            )
        result = (
            (distance - shift[:, None]) * scale[:, None] * _scale(weight, at, columns, OFFSET, C)
        )
        if HAS_BIAS:
            result += tl.load(bias + at, mask=at < columns, other=0.0).to(C)[None, :]
        tl.store(y + start + at[None, :], result.to(y.dtype.element_ty), mask=inner)
    tl.store(rstd + row, scale, mask=row < rows)
    if not RMS:
        tl.store(mean + row, centre + shift, mask=row < rows)


@triton.jit
def _operands(
    dy,
    x,
    at,
    inside,
    centre,
    scale,
    C: tl.constexpr,
    RMS: tl.constexpr,
    TOGETHER: tl.constexpr = False,
):
    """dy, and the normalised h. TOGETHER: both are asked for before either is used."""
    gradient, value = (
        tl.load(dy + at, mask=inside, other=0.0),
        tl.load(x + at, mask=inside, other=0.0),
    )
    if TOGETHER:
        tl.debug_barrier()
    gradient, value = gradient.to(C), value.to(C)
    if not RMS:
        value = tl.where(inside, value - centre, 0.0)
    return gradient, value * scale


@triton.jit
def _gain(
    kept, weight, column, columns, STAGES: tl.constexpr, OFFSET: tl.constexpr, C: tl.constexpr
):
    """`_scale` of the columns, from `kept` where rows are staged: it would be staged with each."""
    if STAGES > 1:
        gain = (kept.to(C) + OFFSET)[None, :]
    else:
        gain = _scale(weight, column, columns, OFFSET, C)
    return gain


@triton.jit
def _store_sums(partial, block, blocks, column, columns, of_weight, of_bias, RMS: tl.constexpr):
    target = partial + block * columns + column
    tl.store(target, tl.sum(of_weight, axis=0), mask=column < columns)
    if not RMS:
        tl.store(target + blocks * columns, tl.sum(of_bias, axis=0), mask=column < columns)


@triton.jit
def _rows_backward(
    dy,
    dsum,
    x,
    weight,
    mean,
    rstd,
    dx,
    partial,
    rows,
    columns,
    tiles,
    RMS: tl.constexpr,
    OFFSET: tl.constexpr,
    MORE: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    of_weight, of_bias = tl.zeros([ROWS, BLOCK], dtype=C), tl.zeros([ROWS, BLOCK], dtype=C)
    tl.assume(tiles > 0)
    kept = weight
    if STAGES > 1:
        kept = tl.load(weight + column, mask=column < columns, other=0.0)
    for t in tl.range(0, tiles, num_stages=STAGES):
        row = (block * tiles + t) * ROWS + tl.arange(0, ROWS)
        start, valid = (row * columns)[:, None], (row < rows)[:, None]
        centre, scale = (
            tl.load(mean + row, mask=row < rows, other=0.0),
            tl.load(rstd + row, mask=row < rows, other=0.0),
        )
        centre, scale = centre[:, None], scale[:, None]
        inside = valid & (column < columns)[None, :]
        # Triton 3.9 else uses half of a row before it asks for the other. Layer norm would spill.
        gradient, h = _operands(
            dy, x, start + column[None, :], inside, centre, scale, C, RMS, RMS and STAGES == 1
        )
        if SUMS:
            of_weight += gradient * h
            of_bias += gradient
        g = gradient * _gain(kept, weight, column, columns, STAGES, OFFSET, C)
        sum_g, sum_gh = g, g * h
        for k in tl.static_range(1, CHUNKS):
            at = k * BLOCK + column
            more, far = _operands(
                dy, x, start + at[None, :], valid & (at < columns)[None, :], centre, scale, C, RMS
            )
            more *= _scale(weight, at, columns, OFFSET, C)
            sum_g += more
            sum_gh += more * far
        mean_gh = (tl.sum(sum_gh, axis=1) / columns)[:, None]
        mean_g = (tl.sum(sum_g, axis=1) / columns)[:, None]
        for k in tl.static_range(CHUNKS):
            at = k * BLOCK + column
            inner = valid & (at < columns)[None, :]
            if k > 0:
                g, h = _operands(dy, x, start + at[None, :], inner, centre, scale, C, RMS)
                g *= _scale(weight, at, columns, OFFSET, C)
            result = g - h * mean_gh
            if not RMS:
                result -= mean_g
            result *= scale
            if MORE:
                result += tl.load(dsum + start + at[None, :], mask=inner, other=0.0).to(C)
            tl.store(dx + start + at[None, :], result.to(dx.dtype.element_ty), mask=inner)
    if SUMS:
        blocks = tl.num_programs(0).to(tl.int64)
        _store_sums(partial, block, blocks, column, columns, of_weight, of_bias, RMS)


@triton.jit
def _columns_backward(
    dy,
    x,
    mean,
    rstd,
    partial,
    rows,
    columns,
    tiles,
    RMS: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sums over rows of rows that are too wide for `_rows_backward` to take them: `tiles` tiles
    of a block of rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1).to(tl.int64)
    of_weight, of_bias = tl.zeros([ROWS, COLUMNS], dtype=C), tl.zeros([ROWS, COLUMNS], dtype=C)
    for t in tl.range(0, tiles, loop_unroll_factor=4):
        row = (block * tiles + t) * ROWS + tl.arange(0, ROWS)
        centre, scale = (
            tl.load(mean + row, mask=row < rows, other=0.0),
            tl.load(rstd + row, mask=row < rows, other=0.0),
        )
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        at = row[:, None] * columns + column[None, :]
        gradient, h = _operands(dy, x, at, inside, centre[:, None], scale[:, None], C, RMS)
        of_weight += gradient * h
        of_bias += gradient
    blocks = tl.num_programs(1).to(tl.int64)
    _store_sums(partial, block, blocks, column, columns, of_weight, of_bias, RMS)
