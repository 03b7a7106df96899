"""The algorithms among which "auto" chooses: those that give the same bits, so that a measurement
never changes a result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["candidates", "cost_key"]

_ORDER_FREE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


def cost_key(flat: Tensor) -> tuple[str, str]:
    """(device type, dtype): tensors of one key have one table of costs."""
    narrow = flat.dtype in (torch.bfloat16, torch.float16)
    return flat.device.type, "16 bit" if narrow else str(flat.dtype)


def candidates(
    flat: Tensor, *, size: int, backend: Callable[[], str], share_memory: Callable[[], bool]
) -> list[str]:
    """Names of the algorithms; the first is taken unless another is clearly faster.

    On the CPU those that sum in rank order, and others where the order does not matter (two ranks,
    integers). On CUDA NCCL's own is taken without a measurement, which would wait for the device in
    the middle of a backward and end a capture; another backend's is weighed against two_shot where
    the order does not matter, and taken elsewhere.

    Args:
        flat: The tensor to be reduced.
        size: Ranks of the group.
        backend: What carries tensors of this device.
        share_memory: Whether the ranks share memory; collective.
    """
    any_order = size == 2 or flat.dtype in _ORDER_FREE
    if flat.is_cuda:
        if flat.dtype == torch.int16:  # which NCCL does not sum
            return ["two_shot"]
        return ["native", "two_shot"] if any_order and backend() != "nccl" else ["native"]
    names = ["two_shot", "ring"] if any_order else ["two_shot"]
    return ["shared_memory", *names] if share_memory() else names
