"""The statistics of rows of logits and their gradient for CUDA: a launch each, each logit read
once.

statistics   a program per row: a lane looks at the logits of one access together and keeps the
             maximum of what it saw and its
             sum of exp(z - maximum); the lanes are merged at the end
gradient     a program per tile of a row
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.launch import computed_in, on_device, tile

__all__ = ["cross_entropy_gradient_", "cross_entropy_statistics_"]

COLUMNS = 4096  # of a tile
STATISTICS_WARPS, GRADIENT_WARPS = 8, 4  # 16 and 32 numbers a thread


def cross_entropy_statistics_(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    """out [N, 3 or 4]: maximum, sum of exp(z - maximum), target's logit, sum of z - maximum."""
    if not len(logits):
        return
    width = tile(columns, most=COLUMNS)
    group = min(width, 16 // logits.element_size())  # of one access
    with on_device(logits):
        _statistics[(len(logits),)](
            out,
            logits,
            targets,
            logits.stride(0),
            first_column,
            columns,
            ignore_index,
            C=computed_in(logits),
            WITH_SUM=out.shape[1] == 4,
            LANES=width // group,
            GROUP=group,
            WHOLE=columns // width,
            REST=columns % width > 0,
            AHEAD=logits.element_size() == 2,  # wider ones have enough on their way
            # Left to itself the compiler takes 40 for fp32, and spills four.
            maxnreg=48 if logits.element_size() == 4 and out.shape[1] == 4 else None,
            num_warps=_warps(width, STATISTICS_WARPS),
        )


def cross_entropy_gradient_(
    out: Tensor,
    logits: Tensor,
    targets: Tensor,
    maxima: Tensor,
    coefficients: Tensor,
    *,
    ignore_index: int,
    first_column: int,
    columns: int,
) -> None:
    """out [N, C] = c_0 exp(z - maximum) + c_2, c_1 more at the target; out may be the logits."""
    rows, everything = logits.shape
    if not rows or not everything:
        return
    width = tile(everything, most=COLUMNS)
    with on_device(logits):
        _gradient[(rows * triton.cdiv(everything, width),)](
            out,
            logits,
            targets,
            maxima,
            coefficients,
            out.stride(0),
            logits.stride(0),
            first_column,
            columns,
            everything,
            ignore_index,
            C=computed_in(logits),
            COLUMNS=width,
            num_warps=_warps(width, GRADIENT_WARPS),
        )


def _warps(width: int, most: int) -> int:
    return max(1, most * width // COLUMNS)


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _offset(highest, C: tl.constexpr):
    """What is added to z log2(e) so that a lane's exponentials are 1 at most. The product must not
    be fused with what it is subtracted from: its rounding is in every term of the lane's sum."""
    return tl.fma(highest, tl.full(highest.shape, -LOG2_E, C), tl.zeros(highest.shape, C))


@triton.jit
def _seen(z, highest, total, C: tl.constexpr):
    """The maxima of lanes that have now seen z [LANES, GROUP] as well, and their sums of
    2^(z log2(e) + offset of the maximum): an operation less than exp(z - maximum) for each z."""
    now = tl.maximum(highest, tl.max(z, axis=1))
    # inf - inf is nan, as it has to be; -inf + inf must not be
    offset = tl.where(now == float("-inf"), 0.0, _offset(now, C))
    terms = tl.exp2(tl.fma(z, tl.full(z.shape, LOG2_E, C), offset[:, None] + tl.zeros(z.shape, C)))
    return now, total * tl.exp2(offset - _offset(highest, C)) + tl.sum(terms, axis=1)


@triton.jit
def _walk(
    z_row,
    columns,
    pivot,
    C: tl.constexpr,
    WITH_SUM: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Of the lanes: maxima, sums of exp(z - maximum), and of z - pivot.

    AHEAD: whether each tile is asked for before the exponentials of the one before it."""
    highest = tl.full([LANES], float("-inf"), dtype=C)
    total, shifted = tl.zeros([LANES], dtype=C), tl.zeros([LANES], dtype=C)
    column = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    ahead = tl.zeros([LANES, GROUP], z_row.dtype.element_ty)  # the compiler reads the loop below
    if AHEAD and WHOLE > 0:  # even where it has no turns: each name has one shape
        ahead = tl.load(z_row + column)
    for t in range(0, WHOLE):  # without masks, which would be a good part of the loop
        if AHEAD:
            z = ahead.to(C)
            next_tile = z_row + (t + 1) * (LANES * GROUP)
            ahead = tl.load(next_tile + column, mask=t + 1 < WHOLE)
        else:
            z = tl.load(z_row + t * (LANES * GROUP) + column).to(C)
        highest, total = _seen(z, highest, total, C)
        if WITH_SUM:
            shifted += tl.sum(z - pivot, axis=1)
    if REST:
        at = WHOLE * (LANES * GROUP) + column
        z = tl.load(z_row + at, mask=at < columns, other=float("-inf")).to(C)
        highest, total = _seen(z, highest, total, C)
        if WITH_SUM:
            shifted += tl.sum(tl.where(at < columns, z - pivot, 0.0), axis=1)
    return highest, total, shifted


@triton.jit
def _statistics(
    out,
    logits,
    targets,
    stride,
    first_column,
    columns,
    ignore_index,
    C: tl.constexpr,
    WITH_SUM: tl.constexpr,
    LANES: tl.constexpr,
    GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
    REST: tl.constexpr,
    AHEAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = out + row * (4 if WITH_SUM else 3)
    target = tl.load(targets + row)
    if target == ignore_index:
        tl.store(place, 0.0)
        tl.store(place + 1, 1.0)
        tl.store(place + 2, 0.0)
        if WITH_SUM:
            tl.store(place + 3, 0.0)
        return
    z_row = logits + row * stride
    # Differences to one logit of the row add up without loss where all have a large number in
    # common.
    pivot = tl.sum(tl.zeros([LANES], dtype=C), axis=0)
    if WITH_SUM and (WHOLE > 0 or REST):
        first = tl.load(z_row).to(C)
        pivot = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    highest, total, shifted = _walk(
        z_row, columns, pivot, C, WITH_SUM, LANES, GROUP, WHOLE, REST, AHEAD
    )
    maximum = tl.max(highest, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    local = target - first_column
    at_target = tl.load(z_row + local, mask=(local >= 0) & (local < columns), other=0.0).to(C)
    tl.store(place, maximum)
    # 2^(maximum log2(e)) is taken out of each lane's sum, which has 2^offset in it.
    rest = tl.fma(shift + tl.zeros([LANES], C), tl.full([LANES], LOG2_E, C), _offset(highest, C))
    sum_of_row = tl.sum(total * tl.exp2(-rest), axis=0)
    # The largest logit alone gives 1; exponentials that are approximated may fall short of it. Rows
    # without a number give 0, and a nan stays.
    tl.store(place + 1, tl.where((sum_of_row < 1.0) & (sum_of_row > 0.5), 1.0, sum_of_row))
    tl.store(place + 2, at_target)
    if WITH_SUM:
        tl.store(place + 3, tl.sum(shifted, axis=0) + columns * (pivot - shift))


@triton.jit
def _gradient(
    out,
    logits,
    targets,
    maxima,
    coefficients,
    out_stride,
    stride,
    first_column,
    columns,
    everything,
    ignore_index,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    across = tl.cdiv(everything, COLUMNS)
    program = tl.program_id(0)
    row = (program // across).to(tl.int64)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(targets + row)
    inside = column < tl.where(target == ignore_index, 0, columns)
    z = tl.load(logits + row * stride + column, mask=inside, other=0.0).to(C)
    maximum = tl.load(maxima + row)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    factor = tl.load(coefficients + 3 * row)
    hot = tl.load(coefficients + 3 * row + 1)
    uniform = tl.load(coefficients + 3 * row + 2)
    local = target - first_column
    here = tl.where((local >= 0) & (local < columns), local, -1).to(tl.int32)  # compared in 32 bits
    gradient = factor * tl.exp(z - shift) + uniform + tl.where(column == here, hot, 0.0)
    value = tl.where(inside, gradient, 0.0).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, value, mask=column < everything)
