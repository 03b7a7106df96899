"""The k-th largest magnitude by counting, and what a mask leaves out set to zero.

    fp32 pattern of |x|    0 | upper 15 bits | lower 16 bits       orders as |x| does

    pass 1   counts of the upper bits                     -> the upper bits of the k-th largest
    pass 2   counts of the lower bits of those that have  -> its lower bits, how many are larger
             these upper bits                                and how many are equal

Nothing is sorted or copied, and counts of ranks add up: the threshold is that of all ranks'
numbers, exact, whoever holds which. Numbers of bf16 have no lower bits, and one process counts them
once. Bytes read per element and pass: 4 of fp32, 2 of bf16 and fp16. The kernels for CUDA are
Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.ops.library import define
from pyops.ops.optimizers.table import row_problem

__all__ = [
    "BINS",
    "UPPER_BINS",
    "Threshold",
    "check_count",
    "check_keep",
    "keep_bits_",
    "keep_bits_reference",
    "kth_magnitude",
    "magnitude_patterns",
    "radix_count_",
    "radix_count_reference",
    "select_bin",
]

BINS = 65536
"""Counters: of the lower 16 bits; the upper ones, whose sign is 0, fill half of them."""
UPPER_BINS = 32768
NOT_FINITE = 0x7F80  # the upper bits of inf and of nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Threshold:
    """The k-th largest magnitude of some numbers.

    Attributes:
        pattern: Its bits as fp32, a whole number that orders as the value does.
        above: How many are larger.
        equal: How many are equal to it; `above` < k <= `above` + `equal`.
    """

    pattern: int
    above: int
    equal: int

    @property
    def value(self) -> float:
        """The magnitude."""
        bits = torch.tensor(self.pattern, dtype=torch.int32, device="cpu")
        return float(bits.view(torch.float32))


def radix_count_(tensors: Sequence[Tensor], counts: Tensor, *, prefix: int | None = None) -> None:
    """Add to `counts` how many magnitudes have which bits.

    Args:
        tensors: of fp32, bf16 or fp16, each non-overlapping and dense; 16-bit numbers count as the
            fp32 that they are.
        counts: int64 [65536] on their device.
        prefix: None counts the upper 15 bits below the sign; a number counts the lower 16 bits of
            those whose upper bits it is.
    """
    torch.ops.pyops.radix_count_.default(list(tensors), counts, prefix=prefix)


def keep_bits_(tensors: Sequence[Tensor], bits: Sequence[Tensor]) -> None:
    """Set to +0, in place, every element whose bit is 0, also one that is not finite.

    Args:
        tensors: contiguous, of fp32, bf16, fp16 or float64.
        bits: uint8 [ceil(n / 8)] for each: element i is bit i % 8 of byte i // 8.

    Bytes per element of fp32: 8 and a bit; a stretch of 64 that are all kept is not touched.
    """
    torch.ops.pyops.keep_bits_.default(list(tensors), list(bits))


def magnitude_patterns(x: Tensor) -> Tensor:
    """int32, of x's shape: the fp32 pattern of |x|, which orders as |x| does."""
    return x.detach().to(torch.float32).contiguous().view(torch.int32) & 0x7FFFFFFF


def kth_magnitude(
    tensors: Sequence[Tensor], k: int, *, reduce: Callable[[Tensor], object] | None = None
) -> Threshold:
    """The k-th largest |x| of all elements, exact, whatever lies in which tensor or on which rank.

    `torch.kthvalue` of the whole, without a copy of it and without a sort.

    Args:
        tensors: at least one, of fp32, bf16 or fp16, each dense; may have no elements.
        k: from 1 to the number of elements, of all ranks.
        reduce: sums an int64 tensor [65536] over the ranks, in place; called twice, and once more
            where a number is inf. None: there are no others. With a process group:
            `pyops.pruning.kth_magnitude`.

    Raises:
        ValueError: on every rank alike: k is out of range, or a magnitude is nan.
    """
    if not tensors:
        raise ValueError("kth_magnitude needs at least one tensor, got an empty list")
    counts = torch.zeros(BINS, dtype=torch.int64, device=tensors[0].device)

    def counted(prefix: int | None) -> Tensor:
        radix_count_(tensors, counts.zero_(), prefix=prefix)
        if reduce is not None:
            reduce(counts)
        return counts.cpu()

    first = counted(None)
    upper, above, here = select_bin(first, k)
    if first[NOT_FINITE] and upper != NOT_FINITE:
        _refuse_nan(counted(NOT_FINITE)[1:])
    if reduce is None and upper != NOT_FINITE and all(t.dtype == torch.bfloat16 for t in tensors):
        return Threshold(upper << 16, above, here)  # there are no lower bits
    lower, beyond, equal = select_bin(counted(upper), k - above, of=upper)
    return Threshold(upper << 16 | lower, above + beyond, equal)


def select_bin(counts: Tensor, k: int, *, of: int | None = None) -> tuple[int, int, int]:
    """(which bin has the k-th largest, how many are in higher bins, how many in it).

    Args:
        counts: int64 [65536], on the CPU.
        k: from 1 to their sum.
        of: the upper bits where the counts are of lower ones.

    Raises:
        ValueError: k is out of range, or what is counted is nan.
    """
    total = int(counts.sum())
    if not 1 <= k <= total:
        raise ValueError(f"k is {k} of {total} numbers; give one from 1 to {total}")
    if of is None:
        _refuse_nan(counts[NOT_FINITE + 1 :])
    if of == NOT_FINITE:
        _refuse_nan(counts[1:])
    from_top = counts.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, torch.tensor(k, device="cpu")))
    here = int(counts[BINS - 1 - place])
    return BINS - 1 - place, int(from_top[place]) - here, here


def _refuse_nan(counts: Tensor) -> None:
    nan = int(counts.sum())
    if nan:
        raise ValueError(f"{nan} of the numbers are nan, which have no order; find out why")


def check_count(tensors: Sequence[Tensor], counts: Tensor, prefix: int | None) -> None:
    """Raise ValueError or TypeError unless the operands of `radix_count_` fit."""
    if counts.dtype != torch.int64 or tuple(counts.shape) != (BINS,):
        raise ValueError(
            f"radix_count_: counts must be int64 [{BINS}]; got {counts.dtype} {list(counts.shape)}"
        )
    if prefix is not None and not 0 <= prefix < UPPER_BINS:
        raise ValueError(
            f"radix_count_: prefix must be None or 0 to {UPPER_BINS - 1}; got {prefix}"
        )
    for i, t in enumerate(tensors):
        if t.dtype not in DTYPES:
            raise TypeError(
                f"radix_count_: tensors[{i}] is {t.dtype}; it must be float32, bfloat16 or float16"
            )
        if (problem := row_problem("tensors", i, t, t)) is not None:
            raise ValueError(f"radix_count_: {problem}")


def check_keep(tensors: Sequence[Tensor], bits: Sequence[Tensor]) -> None:
    """Raise ValueError unless the operands of `keep_bits_` fit."""
    if len(tensors) != len(bits):
        raise ValueError(
            f"keep_bits_: {len(tensors)} tensors and {len(bits)} masks; pass one for each"
        )
    for i, (t, b) in enumerate(zip(tensors, bits, strict=True)):
        if t.dtype not in (*DTYPES, torch.float64) or not t.is_contiguous():
            raise ValueError(
                f"keep_bits_: tensors[{i}] must be contiguous float32, bfloat16, float16 or "
                f"float64; got {t.dtype}, strides {t.stride()}"
            )
        if b.dtype != torch.uint8 or tuple(b.shape) != (-(-t.numel() // 8),):
            raise ValueError(
                f"keep_bits_: bits[{i}] must be uint8 [{-(-t.numel() // 8)}]; got {b.dtype} "
                f"{list(b.shape)}"
            )


def radix_count_reference(tensors: Sequence[Tensor], counts: Tensor, *, prefix: int | None) -> None:
    """The meaning of `radix_count_` in plain torch."""
    check_count(tensors, counts, prefix)
    for x in tensors:
        pattern = magnitude_patterns(x).view(-1)
        upper = pattern >> 16
        found = upper if prefix is None else pattern[upper == prefix] & 0xFFFF
        counts.add_(torch.bincount(found, minlength=BINS))


def keep_bits_reference(tensors: Sequence[Tensor], bits: Sequence[Tensor]) -> None:
    """The meaning of `keep_bits_` in plain torch."""
    check_keep(tensors, bits)
    for t, b in zip(tensors, bits, strict=True):
        places = torch.arange(8, dtype=torch.uint8, device=b.device)
        alive = ((b[:, None] >> places) & 1).view(-1)[: t.numel()].bool()
        t.masked_fill_(~alive.view(t.shape), 0.0)


def _no_result(*_: object, **__: object) -> None:
    return None


define(
    "radix_count_(Tensor[] tensors, Tensor(a!) counts, *, int? prefix) -> ()",
    reference=radix_count_reference,
    fake=_no_result,
    triton="sparse.radix_count",
)
define(
    "keep_bits_(Tensor(a!)[] tensors, Tensor[] bits) -> ()",
    reference=keep_bits_reference,
    fake=_no_result,
    triton="sparse.radix_count",
)
