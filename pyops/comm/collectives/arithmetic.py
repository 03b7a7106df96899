"""The arithmetic of the collectives on flat tensors of any dtype: fp32 inside for 16-bit, one
rounding.

fp32 bf16 fp16 fp64   the kernels of pyops.ops.reduce
complex               as pairs of reals
integers              wrap around; unsigned ones as signed ones of the same width, whose sums have
                      the same bits
bool                  logical or
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.communication.reduce import accumulate_, scale_cast_, sum_rows_

__all__ = [
    "accumulate",
    "check_reducible",
    "partial_dtype",
    "row_starts",
    "scale_in_place",
    "sum_rows",
    "summable_view",
]

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_KERNELS = (torch.float32, *_SIXTEEN_BITS, torch.float64)
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_PLAIN = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def check_reducible(tensor: Tensor, *, op: str) -> None:
    """TypeError or ValueError when `tensor` has no sum, or no mean, over ranks."""
    if op not in ("sum", "mean"):
        raise ValueError(f"op must be 'sum' or 'mean', got {op!r}")
    dtype = tensor.dtype
    if (
        dtype not in _KERNELS
        and dtype not in _PLAIN
        and dtype not in _SIGNED
        and not dtype.is_complex
    ):
        raise TypeError(
            f"{dtype} tensors can't be summed over ranks; cast to float32 or bfloat16 first"
        )
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise TypeError(
            f"the mean of {dtype} tensors is not of that dtype; use op='sum' and divide afterwards"
        )


def row_starts(rows: int, ranks: int) -> list[int]:
    """[0, ..., rows]: where the ranks' parts of so many rows begin, cut as torch.tensor_split
    does."""
    each, more = divmod(rows, ranks)
    return [rank * each + min(rank, more) for rank in range(ranks + 1)]


def summable_view(flat: Tensor) -> Tensor:
    """A flat view whose dtype the functions below take."""
    if flat.dtype.is_complex:
        return torch.view_as_real(flat).view(-1)
    return flat.view(_SIGNED[flat.dtype]) if flat.dtype in _SIGNED else flat


def partial_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a partial sum is kept and sent in, so that nothing is rounded before the end."""
    return torch.float32 if dtype in _SIXTEEN_BITS else dtype


def accumulate(out: Tensor, a: Tensor, *, scale: float = 1.0) -> None:
    """out = round(scale * (out + a))."""
    if out.dtype in _KERNELS:
        accumulate_(out, a, scale=scale)
    else:
        out.add_(a)


def sum_rows(out: Tensor, rows: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """out = round(scale * ((rows[0] + rows[1]) + ...)); `out` may be one of the rows."""
    if out.dtype in _KERNELS:
        sum_rows_(out, rows, scale=scale)
        return
    total = rows[0].clone()
    for row in rows[1:]:
        total.add_(row)
    out.copy_(total)


def scale_in_place(x: Tensor, *, scale: float) -> None:
    """x = round(scale * x)."""
    if scale != 1.0:
        scale_cast_(x, x, scale=scale)
