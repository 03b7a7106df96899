"""radix_count_ and keep_bits_ for CUDA.

    tensor   | block | block | ...        a program goes through every PROGRAMS-th block
    counts   [SHARES, 65536] int32        a few programs add to a row, and all rows are added up:
                                          few wait for each other's counters

Zeros, of which a pruned tensor has the most, are counted in a register. Bytes per element of fp32:
4, and 17 MB of counts; of keep_bits_ 8 and a bit. No GPU has run them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.sparse.radix_count import BINS, check_count, check_keep
from pyops.ops.triton.launch import on_device, tile

__all__ = ["keep_bits_", "radix_count_"]

BLOCK = 1024  # elements of a program at a time, a multiple of 8
PROGRAMS = 1024  # that count
SHARES = 64  # rows of counts
PATTERNS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # whose bits are fp32's
MOST = 1 << 36  # elements whose counts fit the rows: 2^31 each, as the blocks are dealt out


def radix_count_(tensors: Sequence[Tensor], counts: Tensor, *, prefix: int | None) -> None:
    """Add to `counts` how many magnitudes have which bits."""
    check_count(tensors, counts, prefix)
    shares = counts.new_zeros((SHARES, BINS), dtype=torch.int32)
    with on_device(counts):
        for x in tensors:
            n = x.numel()
            if not n:
                continue
            flat = x.detach().as_strided((n,), (1,))  # dense: the order does not matter
            if x.dtype in PATTERNS:
                flat = flat.view(PATTERNS[x.dtype])
            programs = min(PROGRAMS, triton.cdiv(n, BLOCK))
            _count[(programs,)](
                flat,
                shares,
                n,
                -1 if prefix is None else prefix,
                SHIFT=16 if x.dtype == torch.bfloat16 else 0,
                UPPER=prefix is None,
                SHARES=SHARES,
                BINS=BINS,
                BLOCK=tile(n, most=BLOCK),
            )
            if n > MOST // 2:  # before a row is full
                counts += shares.sum(0)
                shares.zero_()
    counts += shares.sum(0)


def keep_bits_(tensors: Sequence[Tensor], bits: Sequence[Tensor]) -> None:
    """Set to +0, in place, every element whose bit is 0."""
    check_keep(tensors, bits)
    for x, mask in zip(tensors, bits, strict=True):
        n = x.numel()
        if not n:
            continue
        with on_device(x):
            _keep[(triton.cdiv(n, BLOCK),)](x.detach(), mask.contiguous(), n, BLOCK=BLOCK)


@triton.jit
def _count(
    x,
    shares,
    n,
    prefix,
    SHIFT: tl.constexpr,
    UPPER: tl.constexpr,
    SHARES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = shares + (tl.program_id(0) % SHARES).to(tl.int64) * BINS
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    zeros = tl.zeros([BLOCK], dtype=tl.int32)
    while start < n:
        at = start + tl.arange(0, BLOCK)
        inside = at < n
        number = tl.load(x + at, mask=inside, other=0)
        if x.dtype.element_ty == tl.float16:
            number = number.to(tl.float32).to(tl.int32, bitcast=True)
        pattern = (number.to(tl.int32) << SHIFT) & 0x7FFFFFFF
        if UPPER:
            bin = pattern >> 16
        else:
            bin = pattern & 0xFFFF
            inside = inside & ((pattern >> 16) == prefix)
        zero = inside & (bin == 0)
        zeros += zero.to(tl.int32)
        tl.atomic_add(own + bin, 1, mask=inside & (bin != 0), sem="relaxed")
        start += step
    tl.atomic_add(own, tl.sum(zeros, axis=0), sem="relaxed")


@triton.jit
def _keep(x, bits, n, BLOCK: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    mask = tl.load(bits + byte, mask=byte < (n + 7) // 8, other=0).to(tl.int32)
    place = tl.arange(0, 8)
    at = byte[:, None] * 8 + place[None, :]
    inside = at < n
    kept = ((mask[:, None] >> place[None, :]) & 1) != 0
    number = tl.load(x + at, mask=inside, other=0.0)
    tl.store(x + at, tl.where(kept, number, 0.0), mask=inside)
