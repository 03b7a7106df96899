"""The product of a few rows with a matrix, for inference: what generation spends its time on.

    y[..., n] = sum over k of x[..., k] weight[n, k] + bias[n]

The weight is read once, at the speed of memory: one row of fp32 is 2 operations for 4 bytes. Sums
are in fp32 (float64 for float64), rounded once; a row's bits do not depend on the other rows, nor
on threads. `linear` chooses between this op and torch's product. On CUDA the op is torch's product.

Bytes: 4 (fp32) for each number of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.layers.activation import FLOATS
from pyops.ops.library import build_info, by_torch_on_cuda, define

__all__ = ["check_operands", "few_rows_linear_reference", "linear"]

NARROW = (torch.bfloat16, torch.float16)
# Rows of x for which the op is faster than torch's product, whose library first copies the weight
# in another order: that pays where there are many rows.
MOST_ROWS = {torch.float32: 64, torch.float64: 16, torch.bfloat16: 8, torch.float16: 8}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's `functional.linear`; of a few rows on the CPU without gradients, faster.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].

    Returns:
        [..., N].
    """
    if (
        not torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.numel() <= MOST_ROWS.get(x.dtype, 0) * x.shape[-1]
        and x.dtype == weight.dtype
        and not torch.is_autocast_enabled("cpu")
        and build_info()["extension"]
    ):
        y: Tensor = torch.ops.pyops.few_rows_linear.default(x, weight, bias)
        return y
    return functional.linear(x, weight, bias)


def check_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the operands of the op fit."""
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"few_rows_linear: x must be [..., K] and weight [N, K]; got {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise TypeError(
            "few_rows_linear: x and weight must be of one dtype of float32, bfloat16, float16 and "
            f"float64; got {x.dtype} and {weight.dtype}; cast with .to(dtype)"
        )
    if bias is not None and (tuple(bias.shape) != (len(weight),) or bias.dtype != x.dtype):
        raise ValueError(
            f"few_rows_linear: bias must be [{len(weight)}] {x.dtype}; got {list(bias.shape)} "
            f"{bias.dtype}"
        )


def few_rows_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The op in plain torch: computed in fp32 (float64), rounded once."""
    check_operands(x, weight, bias)
    dtype = torch.float32 if x.dtype in NARROW else x.dtype
    wide = None if bias is None else bias.detach().to(dtype)
    return functional.linear(x.detach().to(dtype), weight.detach().to(dtype), wide).to(x.dtype)


def _cuda(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    check_operands(x, weight, bias)
    return functional.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    rows = 1
    for size in x[:-1]:
        rows *= size
    return 2 * rows * int(weight[0]) * int(weight[1])


define(
    "few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=few_rows_linear_reference,
    fake=_fake,
    backward=None,
    flops=_flops,
)
by_torch_on_cuda("few_rows_linear", _cuda)
