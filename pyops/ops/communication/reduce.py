"""The arithmetic of collectives: add, sum and cast with one rounding, in a fixed order.

16-bit operands are computed in fp32 and rounded once, to nearest even. Dtypes are any of fp32,
bf16, fp16 (each operand its own), or float64 throughout. All operands are contiguous and of one
size. Bytes per element: the sizes of the operands, and once more that of `out` where it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.ops.library import define

__all__ = [
    "accumulate_",
    "accumulate_reference",
    "scale_cast_",
    "scale_cast_reference",
    "sum_rows_",
    "sum_rows_reference",
]


def accumulate_(out: Tensor, a: Tensor, *, scale: float = 1.0) -> None:
    """out = round(scale * (out + a)). `scale` is rounded to fp32 (to float64 for float64
    tensors)."""
    torch.ops.pyops.accumulate_.default(out, a, scale=scale)


def sum_rows_(out: Tensor, rows: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """out = round(scale * (((rows[0] + rows[1]) + rows[2]) + ...)), in the order of the list; `out`
    may be one of the rows.

    All rows have one dtype. This is the local step of a two-shot all-reduce: one rounding for any
    number of ranks.
    """
    torch.ops.pyops.sum_rows_.default(out, list(rows), scale=scale)


def scale_cast_(out: Tensor, a: Tensor, *, scale: float = 1.0) -> None:
    """out = round(scale * a)."""
    torch.ops.pyops.scale_cast_.default(out, a, scale=scale)


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check(out: Tensor, operands: Sequence[Tensor]) -> torch.dtype:
    """The dtype to compute in; ValueError when the operands don't fit together."""
    tensors = [out, *operands]
    if any(t.numel() != out.numel() or not t.is_contiguous() for t in tensors):
        shapes = [(tuple(t.shape), t.stride()) for t in tensors]
        raise ValueError(
            f"operands must be contiguous and of one size, got (shape, strides) {shapes}"
        )
    if all(t.dtype in _FLOATS for t in tensors):
        return torch.float32
    if all(t.dtype == torch.float64 for t in tensors):
        return torch.float64
    raise ValueError(
        f"dtypes must be of {_FLOATS}, or all float64, got {[t.dtype for t in tensors]}"
    )


def _finish(out: Tensor, value: Tensor, scale: float) -> None:
    out.copy_((value * torch.tensor(scale, dtype=value.dtype, device=value.device)).view(out.shape))


def accumulate_reference(out: Tensor, a: Tensor, *, scale: float = 1.0) -> None:
    """The meaning of `accumulate_` in plain torch, bit for bit."""
    dtype = _check(out, [a])
    _finish(out, out.reshape(-1).to(dtype) + a.reshape(-1).to(dtype), scale)


def sum_rows_reference(out: Tensor, rows: Sequence[Tensor], *, scale: float = 1.0) -> None:
    """The meaning of `sum_rows_` in plain torch, bit for bit."""
    if not rows:
        raise ValueError("sum_rows_ needs at least one row")
    if any(row.dtype != rows[0].dtype for row in rows):
        raise ValueError(f"rows must have one dtype, got {[row.dtype for row in rows]}")
    dtype = _check(out, rows)
    total = rows[0].reshape(-1).to(dtype)
    for row in rows[1:]:
        total = total + row.reshape(-1).to(dtype)
    _finish(out, total, scale)


def scale_cast_reference(out: Tensor, a: Tensor, *, scale: float = 1.0) -> None:
    """The meaning of `scale_cast_` in plain torch, bit for bit."""
    dtype = _check(out, [a])
    _finish(out, a.reshape(-1).to(dtype), scale)


def _fake(out: Tensor, a: Tensor | Sequence[Tensor], *, scale: float = 1.0) -> None:
    return None


define(
    "accumulate_(Tensor(a!) out, Tensor a, *, float scale=1.0) -> ()",
    reference=accumulate_reference,
    fake=_fake,
)
define(
    "sum_rows_(Tensor(a!) out, Tensor[] rows, *, float scale=1.0) -> ()",
    reference=sum_rows_reference,
    fake=_fake,
)
define(
    "scale_cast_(Tensor(a!) out, Tensor a, *, float scale=1.0) -> ()",
    reference=scale_cast_reference,
    fake=_fake,
)
