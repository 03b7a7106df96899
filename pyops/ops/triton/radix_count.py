"""radix_count_ and keep_bits_ for CUDA: counters in global memory, which a program adds to with
atomics of whole numbers, so the counts do not depend on their order."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.sparse.radix_count import check_count, check_keep
from pyops.ops.triton.launch import on_device

__all__ = ["keep_bits_", "radix_count_"]

BLOCK = 4096  # elements of a program


def radix_count_(tensors: Sequence[Tensor], counts: Tensor, *, prefix: int | None) -> None:
    """Add how many magnitudes have which bits."""
    check_count(tensors, counts, prefix)
    for x in tensors:
        if x.numel():
            with on_device(x):
                _count[(triton.cdiv(x.numel(), BLOCK),)](
                    x,
                    counts,
                    x.numel(),
                    0 if prefix is None else prefix,
                    UPPER=prefix is None,
                    BLOCK=BLOCK,
                )


def keep_bits_(tensors: Sequence[Tensor], bits: Sequence[Tensor]) -> None:
    """Set to +0 every element whose bit is 0."""
    check_keep(tensors, bits)
    for x, b in zip(tensors, bits, strict=True):
        if x.numel():
            with on_device(x):
                _keep[(triton.cdiv(x.numel(), BLOCK),)](x, b, x.numel(), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["prefix"])
def _count(x, counts, n, prefix, UPPER: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    pattern = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if UPPER:
        tl.atomic_add(counts + (pattern >> 16), 1, mask=i < n, sem="relaxed")
    else:
        here = (i < n) & ((pattern >> 16) == prefix)
        tl.atomic_add(counts + (pattern & 0xFFFF), 1, mask=here, sem="relaxed")


@triton.jit
def _keep(x, bits, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(bits + i // 8, mask=i < n, other=255).to(tl.int32)
    gone = ((byte >> (i % 8).to(tl.int32)) & 1) == 0
    zero = tl.zeros([BLOCK], x.dtype.element_ty)
    tl.store(x + i, zero, mask=(i < n) & gone)
