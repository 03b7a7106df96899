"""What every launcher needs: the tensor's device, tile sizes, and the dtype to compute in."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["computed_in", "dense", "last_dim_first", "on_device", "tile"]


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def computed_in(x: Tensor) -> Any:
    """fp32, or float64 for float64 tensors."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def dense(x: Tensor | None) -> Tensor | None:
    """x as contiguous, if there is one: a kernel that is given no strides reads what stands next in
    memory."""
    return None if x is None else x.contiguous()


def tile(n: int, *, most: int) -> int:
    """The power of two that covers n, at most `most`."""
    return min(triton.next_power_of_2(max(n, 1)), most)


def last_dim_first(x: Tensor) -> tuple[Tensor, int, int]:
    """x as contiguous [rows, columns], and both numbers."""
    columns = x.shape[-1]
    return x.contiguous(), (x.numel() // columns if columns else 0), columns
