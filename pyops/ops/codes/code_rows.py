"""Few rows times weights of 4 or 8 bits: what a model computes when it writes one word after the
other, and waits for its weights to be read.

    y[r, o] = bias[o] + sum over groups g of
                        s[o, g] (sum over k in g of x[r, k] (c[o, k] - z[o, g]))

x is fp32, bf16 or fp16; codes are whole numbers of 8 or 4 bits, or fp8 e4m3 (Micikevicius et al.,
arXiv:2209.05433), whose z is 0. A weight of one row takes the time of reading it: 1 or 1/2 byte,
where fp32 reads 4. (Weights alone: Dettmers et al., arXiv:2208.07339; Lin et al., arXiv:2306.00978,
section 4.)

On the CPU a row of x is rounded to whole numbers of 24 bits of its largest magnitude, where codes
have one scale for each output, or are symmetric, of 4 bits, in groups of 128 or a multiple: sums of
integers are exact and take a quarter of the instructions. A row with a number that is not finite
gives nan. Other codes are widened to fp32, and sums are sixteen side by side, each in order and
without fused multiplication. Either way: the same bits at every instruction set, on any number of
threads, and for a row whatever stands beside it.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import by_torch_on_cuda, define

__all__ = [
    "FEW",
    "check",
    "code_rows_product",
    "code_rows_product_reference",
    "decode_rows",
    "decode_rows_reference",
    "fits",
]

FEW = 16
"""Rows beyond which widening the weights once for all of them is faster."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_UNITS = {8: 16, 4: 8}  # numbers of a group are a multiple of this


def fits(width: int, groups: int, bits: int) -> bool:
    """Whether the kernel takes rows of `width` codes with scales for so many groups.

    Args:
        width: Numbers of a row.
        groups: Scales of a row.
        bits: Of a code.
    """
    if bits not in _UNITS:
        return False
    return groups == 1 or (width % groups == 0 and width // groups % _UNITS[bits] == 0)


def check(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    bits: int,
) -> None:
    """Raise ValueError or TypeError unless the operands of `code_rows_product` fit.

    Args:
        x: As of `code_rows_product`; so all others.
        codes: See x.
        scales: See x.
        zero_points: See x.
        bias: See x.
        bits: See x.
    """
    if x.dtype not in _FLOATS or x.dim() != 2:
        raise TypeError(
            "code_rows_product: x must be float32, bfloat16 or float16 [rows, width]; got "
            f"{list(x.shape)} {x.dtype}"
        )
    _check_codes("code_rows_product", codes, scales, zero_points, width=x.shape[1], bits=bits)
    if not fits(x.shape[1], scales.shape[1], bits):
        raise ValueError(
            f"code_rows_product: groups must be equal parts of {x.shape[1]} inputs in multiples of "
            f"{_UNITS[bits]}; got {scales.shape[1]} groups"
        )
    out = codes.shape[0]
    if bias is not None and (tuple(bias.shape) != (out,) or bias.dtype != torch.float32):
        raise ValueError(
            f"code_rows_product: bias must be torch.float32 [{out}]; got {list(bias.shape)} "
            f"{bias.dtype}"
        )


def _check_codes(
    op: str, codes: Tensor, scales: Tensor, zero_points: Tensor | None, *, width: int, bits: int
) -> None:
    if bits not in _UNITS:
        raise ValueError(f"{op}: bits must be 4 or 8; got {bits}")
    in_bytes = width if bits == 8 else (width + 1) // 2
    signed = (torch.int8, torch.float8_e4m3fn)
    kinds = signed if bits == 8 and zero_points is None else (torch.uint8,)
    if codes.dim() != 2 or codes.shape[1] != in_bytes or codes.dtype not in kinds:
        raise ValueError(
            f"{op}: codes must be {' or '.join(map(str, kinds))} [out, {in_bytes}] for {width} "
            f"inputs and {bits} bits; got {list(codes.shape)} {codes.dtype}"
        )
    groups = scales.shape[1] if scales.dim() == 2 else 0
    even = bits == 8 or groups == 1 or (groups and width // groups % 2 == 0)
    if not groups or scales.shape[0] != codes.shape[0] or width % groups or not even:
        raise ValueError(
            f"{op}: scales must be [{codes.shape[0]}, groups], the groups equal parts of {width} "
            f"inputs, even ones of 4 bits; got {list(scales.shape)}"
        )
    for name, given, dtype in (
        ("scales", scales, torch.float32),
        ("zero_points", zero_points, torch.int32),
    ):
        if given is not None and (given.shape != scales.shape or given.dtype != dtype):
            raise ValueError(
                f"{op}: {name} must be {dtype} {list(scales.shape)}; got {list(given.shape)} "
                f"{given.dtype}"
            )


def decode_rows(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    *,
    width: int,
    bits: int = 8,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The numbers s (c - z) that rows of codes stand for, computed in fp32. Has no derivative.

    Args:
        codes: As of `code_rows_product`.
        scales: fp32 [out, groups]; groups may be of any equal size, an even one of 4 bits.
        zero_points: int32 of the scales' shape; None where symmetric.
        width: Numbers of a row.
        bits: 8 or 4.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [out, width] of `dtype`.

    Raises:
        ValueError: For operands of other shapes.
        TypeError: For another dtype of the result.
    """
    if dtype not in _FLOATS:
        raise TypeError(f"decode_rows: dtype must be float32, bfloat16 or float16; got {dtype}")
    _check_codes("decode_rows", codes, scales, zero_points, width=width, bits=bits)
    options: dict[str, Any] = {"width": width, "bits": bits, "dtype": dtype}
    found: Tensor = torch.ops.pyops.decode_rows.default(codes, scales, zero_points, **options)
    return found


def code_rows_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int = 8,
) -> Tensor:
    """x W^T + bias with W as codes. Has no derivative.

    Args:
        x: [rows, width], fp32, bf16 or fp16; few rows, up to about `FEW`.
        codes: int8 or float8_e4m3fn [out, width], or uint8 with zero points; of 4 bits uint8
            [out, ceil(width / 2)], two in a byte, the first in the low half.
        scales: fp32 [out, groups], groups of neighboring inputs of equal size, a multiple of 16
            (8 bits) or 8 (4 bits).
        zero_points: int32 of the scales' shape; None where symmetric.
        bias: fp32 [out].
        bits: 8 or 4.

    Returns:
        [rows, out] of x's dtype.

    Raises:
        ValueError: For operands of other shapes, or groups that the kernel does not take.
        TypeError: For another dtype of x.
    """
    check(x, codes, scales, zero_points, bias, bits)
    y: Tensor = torch.ops.pyops.code_rows_product.default(
        x, codes, scales, zero_points, bias, bits=bits
    )
    return y


def code_rows_product_reference(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    bias: Tensor | None,
    *,
    bits: int,
) -> Tensor:
    """The op in plain torch."""
    check(x, codes, scales, zero_points, bias, bits)
    numbers = decode_rows_reference(
        codes, scales, zero_points, width=x.shape[1], bits=bits, dtype=torch.float32
    )
    y = x.detach().float() @ numbers.t()
    return (y if bias is None else y + bias).to(x.dtype)


def decode_rows_reference(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    *,
    width: int,
    bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The op in plain torch."""
    _check_codes("decode_rows", codes, scales, zero_points, width=width, bits=bits)
    if bits == 4:
        both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[:, :width]
        codes = both if zero_points is not None else (both ^ 8).view(torch.int8) - 8
    each = width // scales.shape[1]
    numbers = codes.float()
    if zero_points is not None:
        numbers = numbers - zero_points.repeat_interleave(each, 1)
    return (scales.repeat_interleave(each, 1) * numbers).to(dtype)


def _fake(x: Tensor, codes: Tensor, *_: Any, bits: int) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


def _fake_decode(codes: Tensor, *_: Any, width: int, bits: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty((codes.shape[0], width), dtype=dtype)


def _flops(x: Any, codes: Any, *_: Any, **__: Any) -> int:
    count: int = 2 * prod(x) * codes[0]
    return count


define(
    "code_rows_product(Tensor x, Tensor codes, Tensor scales, Tensor? zero_points, Tensor? bias, "
    "*, int bits) -> Tensor",
    reference=code_rows_product_reference,
    fake=_fake,
    triton="code_rows",
    flops=_flops,
)
define(
    "decode_rows(Tensor codes, Tensor scales, Tensor? zero_points, *, int width, int bits, "
    "ScalarType dtype) -> Tensor",
    reference=decode_rows_reference,
    fake=_fake_decode,
)
by_torch_on_cuda("decode_rows", decode_rows_reference)
