"""How a tensor lies in memory, as far as a kernel that walks memory must know.

dense      its elements fill one stretch of memory, in some order of the dimensions: contiguous,
           transposed, channels_last
gaps       a column block of a larger matrix: dense stand-ins are used, and only its own elements
           are written
overlaps   an expanded tensor: two elements share a place, so an update has no meaning
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["byte_range", "has_overlap", "is_dense", "lies_like", "overlapping"]


def _dimensions(t: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that matter, smallest stride first."""
    return sorted(
        (stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1
    )


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one stretch of memory without gap or overlap."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in _dimensions(t):
        if stride != expected:
            return False
        expected *= size
    return True


def has_overlap(t: Tensor) -> bool:
    """Whether two elements of the tensor share a place in memory. Exact, also for strange
    strides."""
    if t.numel() < 2 or t.is_contiguous():
        return False
    reach = 0
    for stride, size in _dimensions(t):
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    extent = 1 + sum(stride * (size - 1) for stride, size in _dimensions(t))
    places = torch.arange(extent, device="cpu").as_strided(tuple(t.shape), t.stride())
    result: bool = places.unique().numel() != t.numel()
    return result


def lies_like(t: Tensor, strides: Sequence[int]) -> bool:
    """Whether walking `t` in memory order visits elements as `strides` would; dimensions of size 1
    don't matter."""
    return all(
        mine == other or size == 1
        for mine, other, size in zip(t.stride(), strides, t.shape, strict=True)
    )


def byte_range(t: Tensor) -> tuple[int, int]:
    """First byte, and one past the last, of the stretch of memory that holds the tensor's
    elements."""
    if t.numel() == 0:
        return 0, 0
    extent = 1 + sum(stride * (size - 1) for stride, size in zip(t.stride(), t.shape, strict=True))
    start = t.data_ptr()
    return start, start + extent * t.element_size()


def overlapping(tensors: Sequence[Tensor]) -> set[int]:
    """Positions of the tensors whose stretch of memory meets that of an earlier-starting one, or of
    which one does."""
    ranges = sorted((*byte_range(t), i) for i, t in enumerate(tensors) if t.numel())
    found: set[int] = set()
    end, last = 0, -1
    for start, stop, i in ranges:
        if start < end:
            found.update((i, last))
        if stop > end:
            end, last = stop, i
    return found
