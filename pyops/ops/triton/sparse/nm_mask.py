"""nm_mask for CUDA: a thread has a number and counts how many of its group beat it; the flags of
eight neighbors become a byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.sparse.nm_mask import check
from pyops.ops.triton.launch import on_device

__all__ = ["nm_mask"]

BLOCK = 1024  # elements of a program, a multiple of 8
KEYS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def nm_mask(w: Tensor, *, n: int, m: int, dim: int) -> tuple[Tensor, Tensor]:
    """(masked, bits) of w."""
    check(w, n, m, dim)
    w = w.contiguous()
    masked, bits = torch.empty_like(w), w.new_empty((w.numel() + 7) // 8, dtype=torch.uint8)
    if not w.numel():
        return masked, bits
    key = KEYS[w.element_size()]
    inner = 1
    for size in w.shape[dim + 1 :]:
        inner *= size
    with on_device(w):
        _nm_mask[(triton.cdiv(w.numel(), BLOCK),)](
            w.view(key),
            masked.view(key),
            bits,
            w.numel(),
            inner,
            n,
            M=m,
            NEIGHBORS=inner == 1,
            BLOCK=BLOCK,
            MASK=torch.iinfo(key).max,
        )
    return masked, bits


@triton.jit
def _nm_mask(
    w,
    masked,
    bits,
    numel,
    inner,
    n,
    M: tl.constexpr,
    NEIGHBORS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    if NEIGHBORS:
        own = (at % M).to(tl.int32)
        first = at - own
    else:
        own = ((at // inner) % M).to(tl.int32)
        first = at - own.to(tl.int64) * inner
    x = tl.load(w + at, mask=inside, other=0)
    key = x & MASK
    beaten = tl.zeros([BLOCK], dtype=tl.int32)
    for j in tl.static_range(M):
        # The others of the group lie in the cache: the program beside this one reads them, too
        other = tl.load(w + first + (j if NEIGHBORS else j * inner), mask=inside, other=0) & MASK
        beaten += ((other > key) | ((other == key) & (j < own))).to(tl.int32)
    kept = (beaten < n) & inside
    tl.store(masked + at, tl.where(kept, x, 0), mask=inside)
    flags = tl.reshape(kept.to(tl.int32), [BLOCK // 8, 8]) << tl.arange(0, 8)[None, :]
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    tl.store(bits + byte, tl.sum(flags, axis=1).to(tl.uint8), mask=byte < (numel + 7) // 8)
