"""The statistics of rows of logits and their gradient for CUDA: a launch each, each logit read once.

statistics   a program per row: every lane keeps the maximum of what it saw and its sum of exp(z - maximum); merged at the end
gradient     a program per tile of a row
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.launch import computed_in, on_device, tile

__all__ = ["cross_entropy_gradient_", "cross_entropy_statistics_"]

COLUMNS, WARPS = 4096, 8  # of a tile: 16 numbers a thread


def cross_entropy_statistics_(
    out: Tensor, logits: Tensor, targets: Tensor, *, ignore_index: int, first_column: int, columns: int
) -> None:
    """out [N, 3 or 4]: maximum, sum of exp(z - maximum), target's logit, sum of z - maximum."""
    if not len(logits):
        return
    width = tile(columns, most=COLUMNS)
    with on_device(logits):
        _statistics[(len(logits),)](
            out, logits, targets, logits.stride(0), first_column, columns, ignore_index, C=computed_in(logits),
            WITH_SUM=out.shape[1] == 4, COLUMNS=width, TILES=triton.cdiv(columns, width), num_warps=_warps(width),
        )  # fmt: skip


def cross_entropy_gradient_(
    out: Tensor, logits: Tensor, targets: Tensor, maxima: Tensor, coefficients: Tensor, *, ignore_index: int,
    first_column: int, columns: int,
) -> None:  # fmt: skip
    """out [N, C] = c_0 exp(z - maximum) + c_2, c_1 more at the target; out may be the logits."""
    rows, everything = logits.shape
    if not rows or not everything:
        return
    width = tile(everything, most=COLUMNS)
    with on_device(logits):
        _gradient[(rows * triton.cdiv(everything, width),)](
            out, logits, targets, maxima, coefficients, out.stride(0), logits.stride(0), first_column, columns, everything,
            ignore_index, C=computed_in(logits), COLUMNS=width, num_warps=_warps(width),
        )  # fmt: skip


def _warps(width: int) -> int:
    return max(1, WARPS * width // COLUMNS)


@triton.jit
def _statistics(out, logits, targets, stride, first_column, columns, ignore_index, C: tl.constexpr, WITH_SUM: tl.constexpr,
                COLUMNS: tl.constexpr, TILES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    ignored = target == ignore_index
    end = tl.where(ignored, 0, columns)
    z_row = logits + row * stride
    # Differences to one logit of the row add up without loss where all have a large number in common.
    pivot = tl.sum(tl.zeros([COLUMNS], dtype=C), axis=0)
    if WITH_SUM and TILES > 0:
        first = tl.load(z_row, mask=end > 0, other=0.0).to(C)
        pivot = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    highest = tl.full([COLUMNS], float("-inf"), dtype=C)
    total = tl.zeros([COLUMNS], dtype=C)
    shifted = tl.zeros([COLUMNS], dtype=C)
    for t in range(0, TILES):
        column = t * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < end
        z = tl.load(z_row + column, mask=inside, other=float("-inf")).to(C)
        rises = z > highest
        # One of exp(z - new maximum) and exp(old maximum - new maximum) is 1: the other is all there is to compute.
        smaller = tl.exp(-tl.abs(highest - z))
        smaller = tl.where(z == float("-inf"), 0.0, tl.where(z == float("inf"), float("nan"), smaller))
        total = tl.where(rises, total * smaller + 1.0, total + smaller)
        highest = tl.where(rises, z, highest)
        if WITH_SUM:
            shifted += tl.where(inside, z - pivot, 0.0)
    maximum = tl.max(highest, axis=0)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    whole = tl.sum(total * tl.exp(highest - shift), axis=0)
    local = target - first_column
    at_target = tl.load(z_row + local, mask=(local >= 0) & (local < end), other=0.0).to(C)
    place = out + row * (4 if WITH_SUM else 3)
    tl.store(place, tl.where(ignored, 0.0, maximum))
    tl.store(place + 1, tl.where(ignored, 1.0, whole))
    tl.store(place + 2, at_target)
    if WITH_SUM:
        tl.store(place + 3, tl.where(ignored, 0.0, tl.sum(shifted, axis=0) + columns * (pivot - shift)))


@triton.jit
def _gradient(out, logits, targets, maxima, coefficients, out_stride, stride, first_column, columns, everything, ignore_index,
              C: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
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
    gradient = factor * tl.exp(z - shift) + uniform + tl.where(column + first_column == target, hot, 0.0)
    value = tl.where(inside, gradient, 0.0).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + column, value, mask=column < everything)
