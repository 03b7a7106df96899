"""A linear layer of codes of 8 bits in one pass: sums of products, and numbers of them while they
are in registers.

    y[n, o] = s[n] (sum over k of a[n, k] w[o, k] - z[n] sum_k w[o, k]) t[o] + bias[o]

It is `scale_product(int8_product(a, w), ...)` with the same bits, and does not write the int32 sums
to memory: on the CPU where the machine multiplies four bytes and adds them up in one instruction
(AVX-512 VNNI); elsewhere the two steps are taken, with torch's product.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from pyops.ops.codes.scaled import check_sums, int8_product, scale_product_reference
from pyops.ops.codes.scaled import scale_product as scaled
from pyops.ops.library import by_torch_on_cuda, define, load

__all__ = ["int8_linear", "int8_linear_reference", "is_fast"]


def is_fast() -> bool:
    """Whether the machine has the instruction, and the kernels in use take it."""
    handle = load()
    return handle is not None and bool(handle.pyops_int8_linear_is_fast())


def int8_linear(
    a: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    row_zeros: Tensor | None = None,
    sums: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A linear layer of codes. Has no derivative.

    Args:
        a: int8 [rows, K], or uint8 with `row_zeros`: codes of x.
        weight: int8 [out, K].
        row_scales: fp32 s, one for each row, or one for all.
        column_scales: fp32 t [out].
        row_zeros: int32 z, as many as row_scales; with `sums`.
        sums: int32 [out], the sums of the rows of `weight`.
        bias: fp32 [out].
        dtype: of the result: fp32, bf16 or fp16.

    Returns:
        [rows, out] of `dtype`.

    Raises:
        ValueError: For operands of other sizes, or zero points without sums.
        TypeError: For other dtypes.
    """
    if a.device.type != "cpu" or not is_fast():
        acc = int8_product(a, weight, sums)
        return scaled(acc, row_scales, column_scales, row_zeros, sums, bias, dtype=dtype)
    if a.dtype == torch.uint8 and row_zeros is not None:
        a, row_zeros = (a ^ 128).view(torch.int8), row_zeros - 128
    check(a, weight, (row_scales, column_scales, row_zeros, sums, bias), dtype)
    y: Tensor = torch.ops.pyops.int8_linear.default(
        a, weight, row_scales, column_scales, row_zeros, sums, bias, dtype=dtype
    )
    return y


def check(a: Tensor, weight: Tensor, operands: tuple[Any, ...], dtype: torch.dtype) -> None:
    """Raise ValueError or TypeError unless the operands of the op fit.

    Args:
        a: int8 [rows, K].
        weight: int8 [out, K].
        operands: row_scales, column_scales, row_zeros, sums and bias.
        dtype: Of the result.
    """
    if a.dtype != torch.int8 or weight.dtype != torch.int8:
        raise TypeError(
            "int8_linear: a and weight must be int8, or a uint8 with row_zeros; got "
            f"{a.dtype} and {weight.dtype}"
        )
    if a.dim() != 2 or weight.dim() != 2 or a.shape[1] != weight.shape[1]:
        raise ValueError(
            f"int8_linear: a must be [rows, K] and weight [out, K]; got {list(a.shape)} and "
            f"{list(weight.shape)}"
        )
    shape = a.new_empty((), dtype=torch.int32).expand(a.shape[0], weight.shape[0])
    row_scales, column_scales, row_zeros, sums, bias = operands
    check_sums(shape, row_scales, column_scales, row_zeros, sums, bias, None, dtype)


def int8_linear_reference(
    a: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    row_zeros: Tensor | None,
    sums: Tensor | None,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """The op in plain torch."""
    operands = (row_scales, column_scales, row_zeros, sums, bias)
    check(a, weight, operands, dtype)
    acc = int8_product(a, weight)
    return scale_product_reference(acc, *operands, activation=None, dtype=dtype)


def _on_cuda(a: Tensor, weight: Tensor, *operands: Any, dtype: torch.dtype) -> Tensor:
    check(a, weight, operands, dtype)
    return scaled(int8_product(a, weight), *operands, dtype=dtype)


def _fake(a: Tensor, weight: Tensor, *_: Any, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], weight.shape[0]), dtype=dtype)


def _flops(a: Any, weight: Any, *_: Any, **__: Any) -> int:
    count: int = 2 * prod(a) * weight[0]
    return count


define(
    "int8_linear(Tensor a, Tensor weight, Tensor row_scales, Tensor column_scales, "
    "Tensor? row_zeros, Tensor? sums, Tensor? bias, *, ScalarType dtype) -> Tensor",
    reference=int8_linear_reference,
    fake=_fake,
    flops=_flops,
)
by_torch_on_cuda("int8_linear", _on_cuda)
