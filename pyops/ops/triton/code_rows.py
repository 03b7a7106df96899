"""code_rows_product for CUDA: a program reads the codes of some outputs once, for one row of x; the
rows that follow find them in the cache.

A thread reads 16 bytes of codes at a time, which share a scale: it widens them, adds up their
products with x, and multiplies the sum. Where groups are of fewer codes, it reads as many as share
one. x is read with as many words as there are bytes of codes: a number for a code of 8 bits, a pair
for two of 4 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.codes.code_rows import check
from pyops.ops.triton.launch import dense, on_device, tile

__all__ = ["code_rows_product"]

OUTPUTS, BYTES = 4, 2048  # of a tile
WIDE = 16  # bytes of a read
PAIRS = {torch.float32: torch.int64, torch.bfloat16: torch.int32, torch.float16: torch.int32}
HALVES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def code_rows_product(
    x: Tensor, codes: Tensor, scales: Tensor, *rest: Tensor | None, bits: int
) -> Tensor:
    """x W^T + bias with W as codes. `rest`: zero_points and bias."""
    zero_points, bias = rest
    check(x, codes, scales, zero_points, bias, bits)
    rows, width, out = x.shape[0], x.shape[1], codes.shape[0]
    y = x.new_empty((rows, out))
    if not y.numel():
        return y
    groups = scales.shape[1]
    group = width // groups * bits // 8
    unit = WIDE if groups == 1 else min(WIDE, group & -group)
    units = max(tile(codes.shape[1], most=BYTES) // unit, 1)
    kind = "e4m3" if codes.dtype == torch.float8_e4m3fn else "whole"
    with on_device(x):
        _product[(triton.cdiv(out, OUTPUTS), rows)](
            _pairs(x) if bits == 4 else dense(x),
            dense(codes.view(torch.uint8) if kind == "e4m3" else codes),
            *(dense(t) for t in (scales, zero_points, bias)),
            y,
            codes.shape[1],
            out,
            groups,
            max(group // unit, 1),
            KIND="pairs" if bits == 4 else kind,
            HALF=HALVES[x.dtype],
            ZEROS=zero_points is not None,
            HAS_BIAS=bias is not None,
            OUTPUTS=OUTPUTS,
            UNITS=units,
            UNIT=unit,
            num_warps=min(max(units // 32, 1), 8),
        )
    return y


def _pairs(x: Tensor) -> Tensor:
    """Two numbers of a row as one word, the first in its low half."""
    x = torch.nn.functional.pad(x, (0, x.shape[1] % 2)).contiguous()
    if x.storage_offset() % 2:
        x = x.clone()
    return x.view(PAIRS[x.dtype])


@triton.jit
def _number(code, KIND: tl.constexpr):
    """What codes of 8 bits stand for, in fp32."""
    if KIND == "e4m3":
        word = code.to(tl.int32)
        magnitude = word & 127
        tiny = (magnitude.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
        bits = tl.where(magnitude < 8, tiny, (magnitude << 20) + (120 << 23))
        bits = tl.where(magnitude == 127, 0x7FC00000, bits) | ((word & 128) << 24)
        return bits.to(tl.float32, bitcast=True)
    return code.to(tl.float32)


@triton.jit
def _nibble(code, SHIFT: tl.constexpr, ZEROS: tl.constexpr):
    """The half of bytes from bit SHIFT on, in fp32."""
    bits = (code.to(tl.int32) >> SHIFT) & 15
    if not ZEROS:
        bits = (bits ^ 8) - 8
    return bits.to(tl.float32)


@triton.jit
def _product(
    x,
    codes,
    scales,
    zeros,
    bias,
    y,
    row_bytes,
    outputs,
    groups,
    each,
    KIND: tl.constexpr,
    HALF: tl.constexpr,
    ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    UNITS: tl.constexpr,
    UNIT: tl.constexpr,
):
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1).to(tl.int64)
    valid = output < outputs
    total = tl.zeros([OUTPUTS, UNITS], dtype=tl.float32)
    for start in range(0, row_bytes, UNITS * UNIT):
        unit = start // UNIT + tl.arange(0, UNITS)
        byte = unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
        there = byte < row_bytes
        inside = valid[:, None, None] & there[None, :, :]
        at = output[:, None, None] * row_bytes + byte[None, :, :]
        code = tl.load(codes + at, mask=inside, other=0)
        given = tl.load(x + row * row_bytes + byte, mask=there, other=0)
        place = output[:, None] * groups + tl.minimum(unit // each, groups - 1)[None, :]
        here = valid[:, None] & (unit * UNIT < row_bytes)[None, :]
        scale = tl.load(scales + place, mask=here, other=0.0)
        zero = tl.zeros([OUTPUTS, UNITS], dtype=tl.float32)
        if ZEROS:
            zero = tl.load(zeros + place, mask=here, other=0).to(tl.float32)
        if KIND == "pairs":
            if HALF.is_bf16():  # the upper half of an fp32 number
                first = (given << 16).to(tl.float32, bitcast=True)
                second = (given & -65536).to(tl.float32, bitcast=True)
            else:
                HALF_BITS: tl.constexpr = HALF.primitive_bitwidth
                WORD: tl.constexpr = tl.int32 if HALF_BITS == 32 else tl.int16
                first = given.to(WORD).to(HALF, bitcast=True).to(tl.float32)
                second = (given >> HALF_BITS).to(WORD).to(HALF, bitcast=True).to(tl.float32)
            part = first[None, :, :] * (_nibble(code, 0, ZEROS) - zero[:, :, None])
            part += second[None, :, :] * (_nibble(code, 4, ZEROS) - zero[:, :, None])
        else:
            part = given.to(tl.float32)[None, :, :] * (_number(code, KIND) - zero[:, :, None])
        total += scale * tl.sum(part, axis=2)
    result = tl.sum(total, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + output, mask=valid, other=0.0)
    tl.store(y + row * outputs + output, result.to(y.dtype.element_ty), mask=valid)
