"""A sparse matrix times a dense one: y = A x, where A is given by its rows' nonzeros.

    A = [[0, 2, 0],      starts   0 1 1 3      where the values of each row begin
         [0, 0, 0],      columns  1   0 2
         [5, 0, 3]]      values   2   5 3

Sums are in x's dtype, over the values of a row in their order. It pays where few weights are alive:
the values are read once for each block of columns of x, and an x of a few MB stays in the caches.
On CUDA the product is torch's own.

Bytes: 8 for each value, and 4 for each number of x and y, of fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.library import by_torch_on_cuda, define

__all__ = ["check", "csr_product", "csr_product_reference"]


def csr_product(starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """A x, without a derivative: for inference.

    Args:
        starts: int64 [rows + 1], rising from 0 to the number of values.
        columns: int32, of each value.
        values: fp32 or float64, row after row.
        x: [inputs, width] of values' dtype.

    Returns:
        [rows, width].

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for other dtypes.
        RuntimeError: for starts that do not rise, and columns that x does not have.
    """
    check(starts, columns, values, x)
    found: Tensor = torch.ops.pyops.csr_product.default(starts, columns, values, x)
    return found


def check(starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> None:
    """Raise ValueError or TypeError unless shapes and dtypes fit; what is in them is not looked
    at."""
    if x.dtype not in (torch.float32, torch.float64) or values.dtype != x.dtype:
        raise TypeError(
            f"csr_product: values and x must be both float32 or both float64; got {values.dtype} "
            f"and {x.dtype}"
        )
    if starts.dtype != torch.int64 or columns.dtype != torch.int32:
        raise TypeError(
            f"csr_product: starts must be int64 and columns int32; got {starts.dtype} and "
            f"{columns.dtype}"
        )
    if x.dim() != 2 or starts.dim() != 1 or not len(starts):
        raise ValueError(
            f"csr_product: x must be [inputs, width] and starts [rows + 1]; got {list(x.shape)} "
            f"and {list(starts.shape)}"
        )
    if columns.dim() != 1 or columns.shape != values.shape:
        raise ValueError(
            "csr_product: columns and values must be of one dimension, one of each for each "
            f"nonzero; got {list(columns.shape)} and {list(values.shape)}"
        )


def csr_product_reference(starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """The op in plain torch."""
    check(starts, columns, values, x)
    counts = starts.diff()
    rising = bool((counts >= 0).all()) and int(starts[0]) == 0 and int(starts[-1]) == len(values)
    inside = not len(columns) or (int(columns.min()) >= 0 and int(columns.max()) < len(x))
    if not rising or not inside:
        raise RuntimeError(
            f"csr_product: starts must rise from 0 to the number of values, {len(values)}, and "
            f"columns be 0 to {len(x) - 1}"
        )
    rows = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    out = x.new_zeros(len(counts), x.shape[1])
    return out.index_add_(0, rows, values.detach()[:, None] * x.detach()[columns.long()])


def _cuda(starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    check(starts, columns, values, x)
    shape = (len(starts) - 1, len(x))
    found: Tensor = torch.sparse_csr_tensor(starts, columns.long(), values, shape) @ x
    return found


def _fake(starts: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(starts.shape[0] - 1, x.shape[1])


def _flops(starts: Any, columns: Any, values: Any, x: Any, **_: Any) -> int:
    count: int = 2 * values[0] * x[1]
    return count


define(
    "csr_product(Tensor starts, Tensor columns, Tensor values, Tensor x) -> Tensor",
    reference=csr_product_reference,
    fake=_fake,
    flops=_flops,
)
by_torch_on_cuda("csr_product", _cuda)
