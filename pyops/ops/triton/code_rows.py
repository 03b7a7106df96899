"""code_rows_product for CUDA: a program reads the codes of some outputs once, for one row of x; the
rows that follow find them in the cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.codes.code_rows import check
from pyops.ops.triton.launch import dense, on_device, tile

__all__ = ["code_rows_product"]

OUTPUTS, INPUTS = 8, 512  # of a tile


def code_rows_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
) -> Tensor:
    """x W^T + bias with W as codes."""
    check(x, codes, scales, zero_points, bias, bits)
    rows, width, out = x.shape[0], x.shape[1], codes.shape[0]
    y = x.new_empty((rows, out))
    if y.numel():
        with on_device(x):
            _product[(triton.cdiv(out, OUTPUTS), rows)](
                *(dense(t) for t in (x, codes, scales, zero_points, bias)),
                y,
                width,
                codes.shape[1],
                out,
                scales.shape[1],
                max(width // scales.shape[1], 1),
                EACH=8 // bits,
                ZEROS=zero_points is not None,
                HAS_BIAS=bias is not None,
                OUTPUTS=OUTPUTS,
                INPUTS=tile(codes.shape[1], most=INPUTS),
            )
    return y


@triton.jit
def _product(
    x,
    codes,
    scales,
    zeros,
    bias,
    y,
    width,
    row_bytes,
    outputs,
    groups,
    group,
    EACH: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1).to(tl.int64)
    valid = output < outputs
    total = tl.zeros([OUTPUTS, INPUTS], dtype=tl.float32)
    for start in range(0, row_bytes, INPUTS):
        byte = start + tl.arange(0, INPUTS)
        inside = valid[:, None] & (byte < row_bytes)[None, :]
        code = tl.load(codes + output[:, None] * row_bytes + byte[None, :], mask=inside, other=0)
        code = code.to(tl.int32)
        for k in tl.static_range(EACH):
            at = byte * EACH + k
            number = code
            if EACH == 2:
                number = (code >> (4 * k)) & 15
                if not ZEROS:
                    number = (number ^ 8) - 8
            place = output[:, None] * groups + tl.minimum(at // group, groups - 1)[None, :]
            if ZEROS:
                number -= tl.load(zeros + place, mask=inside, other=0)
            scale = tl.load(scales + place, mask=inside, other=0.0)
            given = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            total += scale * (number.to(tl.float32) * given[None, :])
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=valid, other=0.0)
    tl.store(y + row * outputs + output, result.to(y.dtype.element_ty), mask=valid)
