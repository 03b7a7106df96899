"""What surrounds a product of integers: rows to codes of 8 bits with a scale for each before it,
and int32 sums to numbers after it, one pass each.

    x [rows, K]  --> codes, scale of each row                       quantize_rows
    codes, W's codes  --> acc[n, o] = sum over k of c[n, k] w[o, k]  int8_product: int32, exact
    acc  --> y[n, o] = act(s[n] (acc[n, o] - z[n] sum_k w[o, k]) t[o] + bias[o])   scale_product

    symmetric    s = max |x| / 127                  c = round(x / s)        -127 .. 127, z = 0
    asymmetric   s = (max(x, 0) - min(x, 0)) / 255  c = round(x / s) + z    0 .. 255
                 z = round(-min(x, 0) / s)

(int8: Jacob et al., arXiv:1712.05877, section 2; a scale for each row of activations: Dettmers et
al., arXiv:2208.07339, section 3.) Arithmetic is fp32, every operation rounded once, to nearest
even: every instruction set, any number of threads, and plain torch give the same bits, an
activation aside. A row of zeros has scale 0 and codes 0. A row with a number that is not finite has
the scale nan and codes 0, so that its y are nan.

The sums are exact where 127 * 127 K < 2^31, K <= 133,144 (255 * 127 K, K <= 66,311 asymmetric).
Bytes per element of fp32: quantize_rows 5 of memory, 9 with the caches; scale_product 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyops.ops.layers.activation import ACTIVATIONS, activate
from pyops.ops.library import define
from pyops.torch_private import int8_matmul

__all__ = [
    "LONGEST",
    "LONGEST_ASYMMETRIC",
    "QuantizedRows",
    "check_rows",
    "check_sums",
    "codes_of",
    "int8_product",
    "quantize_rows",
    "quantize_rows_reference",
    "range_scales",
    "row_extents",
    "row_extents_reference",
    "scale_product",
    "scale_product_reference",
    "scale_sums_",
    "scale_sums_reference",
]

LONGEST, LONGEST_ASYMMETRIC = 133_144, 66_311
"""The most numbers of a row whose products of 8 bits surely fit an int32 sum."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantizedRows(NamedTuple):
    """Rows as codes."""

    codes: Tensor
    """int8, or uint8 where asymmetric, of x's shape."""
    scales: Tensor
    """fp32, x's shape without its last dimension."""
    zero_points: Tensor | None
    """int32 of the scales' shape; None where symmetric."""


def range_scales(
    lowest: Tensor, highest: Tensor, *, low: int, high: int
) -> tuple[Tensor, Tensor | None]:
    """Scales, and zero points unless `low` is below 0, of blocks whose numbers lie from `lowest` to
    `highest`, in plain torch.

    Args:
        lowest: fp32, at most 0; nan where a block has a number that is not finite.
        highest: fp32, at least 0, of the same shape.
        low: The lowest code: 0, or -high for symmetric codes.
        high: The highest code.
    """
    extent = highest if low < 0 else highest - lowest
    # By a tensor: CUDA's division by a number multiplies by its inverse, which rounds twice.
    scales = extent / torch.full_like(extent, high)
    scales = scales.masked_fill(~torch.isfinite(scales), torch.nan)
    if low < 0:
        return scales, None
    usable = scales > 0
    zeros = torch.round(-lowest / torch.where(usable, scales, 1.0)).clamp(low, high)
    return scales, torch.where(usable, zeros, 0.0).to(torch.int32)


def codes_of(
    x: Tensor, scales: Tensor, zero_points: Tensor | None, *, low: int, high: int
) -> Tensor:
    """Codes of fp32 numbers in plain torch, as whole numbers in fp32: 0 where a scale is 0 or nan,
    and where x is nan.

    Args:
        x: fp32.
        scales: fp32 that broadcasts to x.
        zero_points: int32 of the scales' shape, or None.
        low: The lowest code.
        high: The highest code.
    """
    usable = (scales > 0) & ~torch.isnan(x)
    rounded = torch.round(x / torch.where(scales > 0, scales, 1.0))
    if zero_points is not None:
        rounded = rounded + zero_points
    return torch.where(usable, rounded.clamp(low, high), 0.0)


def _code_range(symmetric: bool) -> dict[str, int]:
    return {"low": -127, "high": 127} if symmetric else {"low": 0, "high": 255}


def check_rows(
    op: str, x: Tensor, scales: Tensor | None, zero_points: Tensor | None, symmetric: bool
) -> None:
    """Raise ValueError or TypeError unless rows and scales that were found beforehand fit.

    Args:
        op: The caller, for the message.
        x: As of `quantize_rows`; so all others.
        scales: See x.
        zero_points: See x.
        symmetric: See x.
    """
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{op}: x must be float32, bfloat16 or float16; got {x.dtype}; cast it with .to(dtype)"
        )
    if x.dim() == 0:
        raise ValueError(f"{op}: x must be [..., width]; got one number; take x[None]")
    if (zero_points is not None) != (scales is not None and not symmetric):
        raise ValueError(
            f"{op}: zero_points belong to scales of codes that are not symmetric; got scales "
            f"{'given' if scales is not None else 'None'}, symmetric={symmetric} and zero_points "
            f"{'given' if zero_points is not None else 'None'}"
        )
    rows = x.shape[:-1].numel()
    for name, given, dtype in (
        ("scales", scales, torch.float32),
        ("zero_points", zero_points, torch.int32),
    ):
        if given is None:
            continue
        if given.numel() not in (1, rows) or given.dtype != dtype:
            raise ValueError(
                f"{op}: {name} must have 1 number or {rows}, one for each row, of {dtype}; got "
                f"{list(given.shape)} {given.dtype}"
            )
    if scales is not None and zero_points is not None and scales.numel() != zero_points.numel():
        raise ValueError(
            f"{op}: {scales.numel()} scales have {zero_points.numel()} zero_points; give as many"
        )


def quantize_rows(
    x: Tensor,
    scales: Tensor | None = None,
    zero_points: Tensor | None = None,
    *,
    symmetric: bool = True,
) -> QuantizedRows:
    """Codes of 8 bits of each row of x, and its scale. Has no derivative.

    Args:
        x: [..., width], fp32, bf16 or fp16.
        scales: fp32 scales found beforehand, one for each row or one for all; None: found here,
            from each row's largest magnitude. What lies beyond is clipped.
        zero_points: int32 beside `scales` where not symmetric.
        symmetric: Whether codes lie around 0.

    Returns:
        Codes of x's shape and the scales that they were made with: nan of a row with a number that
        is not finite.

    Raises:
        ValueError: For scales of another number, or zero points without scales.
        TypeError: For other dtypes.
    """
    check_rows("quantize_rows", x, scales, zero_points, symmetric)
    codes, found, zeros = torch.ops.pyops.quantize_rows.default(
        x, scales, zero_points, symmetric=symmetric
    )
    return QuantizedRows(codes, found, None if symmetric else zeros)


def row_extents(x: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """The least and the greatest number of each row, with 0 among them; where symmetric -max |x|
    and max |x|. nan where a number is not finite. Reduced over ranks, they give the scale of rows
    that several ranks hold parts of.

    Args:
        x: [..., width], fp32, bf16 or fp16.
        symmetric: Whether magnitudes are wanted.

    Returns:
        Two fp32 tensors, of x's shape without its last dimension.
    """
    check_rows("row_extents", x, None, None, symmetric)
    lowest, highest = torch.ops.pyops.row_extents.default(x, symmetric=symmetric)
    return lowest, highest


def int8_product(a: Tensor, weight: Tensor, sums: Tensor | None = None) -> Tensor:
    """acc[n, o] = sum over k of a[n, k] weight[o, k], exactly, by torch's product of int8.

    Args:
        a: int8 or uint8 [rows, K].
        weight: int8 [out, K].
        sums: int32 [out], the sums of the weight's rows; wanted where a is uint8.

    Returns:
        int32 [rows, out].

    Raises:
        ValueError: For shapes that do not fit, or uint8 without `sums`.
        TypeError: For other dtypes.
    """
    if weight.dtype != torch.int8 or a.dtype not in (torch.int8, torch.uint8):
        raise TypeError(
            f"int8_product: a must be int8 or uint8 and weight int8; got {a.dtype} and "
            f"{weight.dtype}"
        )
    if a.dim() != 2 or weight.dim() != 2 or a.shape[1] != weight.shape[1]:
        raise ValueError(
            f"int8_product: a must be [rows, K] and weight [out, K]; got {list(a.shape)} and "
            f"{list(weight.shape)}"
        )
    if a.dtype == torch.int8:
        return _signed_product(a, weight)
    if sums is None:
        raise ValueError("int8_product: uint8 codes want `sums`, weight.sum(1, dtype=torch.int32)")
    # c = 128 + (c - 128), of which the second fits int8
    return _signed_product((a ^ 128).view(torch.int8), weight) + 128 * sums


def _signed_product(a: Tensor, weight: Tensor) -> Tensor:
    rows, out = a.shape[0], weight.shape[0]
    if not a.numel() or not weight.numel():
        return a.new_zeros((rows, out), dtype=torch.int32)
    if a.is_cuda:  # cuBLAS needs more than 16 rows, and widths that are multiples of 8
        inner = -a.shape[1] % 8
        a = torch.nn.functional.pad(a, (0, inner, 0, max(17 - rows, 0)))
        weight = torch.nn.functional.pad(weight, (0, inner, 0, -out % 8))
        return int8_matmul(a, weight.t())[:rows, :out].contiguous()
    return int8_matmul(a, weight.t())


def check_sums(
    acc: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    row_zeros: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
) -> None:
    """Raise ValueError or TypeError unless the operands of `scale_product` fit.

    Args:
        acc: As of `scale_product`; so all others.
        row_scales: See acc.
        column_scales: See acc.
        row_zeros: See acc.
        sums: See acc.
        bias: See acc.
        activation: See acc.
        dtype: See acc.
    """
    if acc.dtype != torch.int32 or dtype not in _FLOATS:
        raise TypeError(
            "scale_product: acc must be int32 and dtype float32, bfloat16 or float16; got "
            f"{acc.dtype} and {dtype}"
        )
    if acc.dim() == 0:
        raise ValueError("scale_product: acc must be [..., out]; got one number")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(
            f"scale_product: activation must be None or one of {', '.join(ACTIVATIONS)}; got "
            f"{activation!r}"
        )
    if (row_zeros is None) != (sums is None):
        raise ValueError("scale_product: row_zeros and sums belong together; give both or neither")
    rows, out = acc.shape[:-1].numel(), acc.shape[-1]
    each = row_scales.numel()
    for name, given, counts, kind in (
        ("row_scales", row_scales, (1, rows), torch.float32),
        ("column_scales", column_scales, (out,), torch.float32),
        ("row_zeros", row_zeros, (each,), torch.int32),
        ("sums", sums, (out,), torch.int32),
        ("bias", bias, (out,), torch.float32),
    ):
        if given is not None and (given.numel() not in counts or given.dtype != kind):
            raise ValueError(
                f"scale_product: {name} must be {kind} of {' or '.join(map(str, counts))} numbers "
                f"for acc {list(acc.shape)}; got {list(given.shape)} {given.dtype}"
            )


def scale_product(
    acc: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    row_zeros: Tensor | None = None,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """act(s[n] (acc[n, o] - z[n] sums[o]) t[o] + bias[o]) in one pass. Has no derivative.

    Args:
        acc: int32 [..., out], as of `int8_product`.
        row_scales: fp32 s, one for each row of acc, or one for all.
        column_scales: fp32 t [out].
        row_zeros: int32 z, as many as row_scales; with `sums`.
        sums: int32 [out], the sums of the weight's codes.
        bias: fp32 [out].
        activation: "gelu", "gelu_tanh", "relu" or "silu", applied before y is rounded.
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [..., out] of `dtype`.

    Raises:
        ValueError: For operands of other sizes, or zero points without sums.
        TypeError: For other dtypes.
    """
    check_sums(acc, row_scales, column_scales, row_zeros, sums, bias, activation, dtype)
    y: Tensor = torch.ops.pyops.scale_product.default(
        acc, row_scales, column_scales, row_zeros, sums, bias, activation=activation, dtype=dtype
    )
    return y


def scale_sums_(
    acc: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    row_zeros: Tensor | None = None,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`scale_product` in fp32 in the place of the sums, whose memory is written over: bit for bit
    the same numbers, without a result's fresh pages.

    Args:
        acc: As of `scale_product`; afterwards its bits are those of the numbers.
        row_scales: See acc.
        column_scales: See acc.
        row_zeros: See acc.
        sums: See acc.
        bias: See acc.

    Returns:
        acc as fp32.

    Raises:
        ValueError: As of `scale_product`.
        TypeError: As of `scale_product`.
    """
    check_sums(acc, row_scales, column_scales, row_zeros, sums, bias, None, torch.float32)
    torch.ops.pyops.scale_sums_.default(acc, row_scales, column_scales, row_zeros, sums, bias)
    return acc.view(torch.float32)


def _blocks_of_rows(x: Tensor, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Least and greatest of each row of fp32 numbers, 0 among them; nan for a row that is not
    finite."""
    if not x.shape[-1]:
        return x.new_zeros(x.shape[:-1]), x.new_zeros(x.shape[:-1])
    highest = (x.abs() if symmetric else x).amax(-1).clamp_min(0)
    lowest = -highest if symmetric else x.amin(-1).clamp_max(0)
    bad = ~(torch.isfinite(lowest) & torch.isfinite(highest))
    return lowest.masked_fill(bad, torch.nan), highest.masked_fill(bad, torch.nan)


def row_extents_reference(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    return _blocks_of_rows(x.detach().float(), symmetric)


def quantize_rows_reference(
    x: Tensor, scales: Tensor | None, zero_points: Tensor | None, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in plain torch: codes, scales, and zero points or [0]."""
    check_rows("quantize_rows", x, scales, zero_points, symmetric)
    wide, limits = x.detach().float(), _code_range(symmetric)
    lowest, highest = _blocks_of_rows(wide, symmetric)
    found, zeros = range_scales(lowest, highest, **limits)
    if scales is not None:
        given = scales.reshape(-1).expand(highest.numel()).reshape(highest.shape)
        found = given.masked_fill(torch.isnan(highest), torch.nan)
        if zero_points is not None:
            own = zero_points.reshape(-1).expand(highest.numel()).reshape(highest.shape)
            zeros = own.masked_fill(~(found > 0), 0)
    codes = codes_of(
        wide, found.unsqueeze(-1), None if zeros is None else zeros.unsqueeze(-1), **limits
    )
    return (
        codes.to(torch.int8 if symmetric else torch.uint8),
        found.contiguous(),
        x.new_empty(0, dtype=torch.int32) if zeros is None else zeros,
    )


def scale_product_reference(
    acc: Tensor, *operands: Any, activation: str | None, dtype: torch.dtype
) -> Tensor:
    """The op in plain torch. `operands`: row_scales, column_scales, row_zeros, sums, bias."""
    row_scales, column_scales, row_zeros, sums, bias = operands
    check_sums(acc, row_scales, column_scales, row_zeros, sums, bias, activation, dtype)
    lead = acc.shape[:-1]

    def of_rows(t: Tensor) -> Tensor:
        return t.reshape(-1).expand(lead.numel()).reshape(*lead, 1)

    if row_zeros is not None and sums is not None:
        acc = acc - of_rows(row_zeros) * sums
    y: Tensor = acc.float() * of_rows(row_scales) * column_scales
    if bias is not None:
        y = y + bias
    return (y if activation is None else activate(y, activation)).to(dtype)


def scale_sums_reference(acc: Tensor, *operands: Any) -> None:
    """The op `scale_sums_` in plain torch. `operands`: as of `scale_product_reference`."""
    y = scale_product_reference(acc, *operands, activation=None, dtype=torch.float32)
    acc.copy_(y.view(torch.int32))


def _fake_quantize_rows(
    x: Tensor, scales: Tensor | None, zero_points: Tensor | None, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.int8 if symmetric else torch.uint8),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
        x.new_empty([0] if symmetric else x.shape[:-1], dtype=torch.int32),
    )


def _fake_row_extents(x: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor]:
    lowest = x.new_empty(x.shape[:-1], dtype=torch.float32)
    return lowest, torch.empty_like(lowest)


def _fake_scale_product(acc: Tensor, *_: Any, activation: str | None, dtype: torch.dtype) -> Tensor:
    return acc.new_empty(acc.shape, dtype=dtype)


def _fake_scale_sums(*_: Any) -> None:
    return None


define(
    "quantize_rows(Tensor x, Tensor? scales, Tensor? zero_points, *, bool symmetric) -> "
    "(Tensor, Tensor, Tensor)",
    reference=quantize_rows_reference,
    fake=_fake_quantize_rows,
    triton="scaled",
)
define(
    "row_extents(Tensor x, *, bool symmetric) -> (Tensor, Tensor)",
    reference=row_extents_reference,
    fake=_fake_row_extents,
    triton="scaled",
)
define(
    "scale_product(Tensor acc, Tensor row_scales, Tensor column_scales, Tensor? row_zeros, "
    "Tensor? sums, Tensor? bias, *, str? activation, ScalarType dtype) -> Tensor",
    reference=scale_product_reference,
    fake=_fake_scale_product,
    triton="scaled",
)
define(
    "scale_sums_(Tensor(a!) acc, Tensor row_scales, Tensor column_scales, Tensor? row_zeros, "
    "Tensor? sums, Tensor? bias) -> ()",
    reference=scale_sums_reference,
    fake=_fake_scale_sums,
    triton="scaled",
)
