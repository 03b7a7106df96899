"""How often each number was seen, in bins that are known before any number is: the first 16 bits of
fp32.

    sign | exponent, 8 bits | first 7 of 23 bits of the fraction | rest     65,536 counters, int64

A bin is 2^-7 of its number wide, near 0 and far from it alike. So one pass over the data suffices,
and counts of several ranks are added exactly: what is read off does not depend on how the examples
were shared out.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from pyops.quantized.calibration.over_ranks import greatest, least, summed
from pyops.quantized.formats import Format, code_range, scales_of
from pyops.tensor_parallel import Ranks

__all__ = ["Histogram"]

BINS = 1 << 16
CLIPS = range(20, 101)  # hundredths of the largest magnitude that are tried
LINEAR = 2048  # equal bins of magnitudes that the entropy is taken over
EVERY = 16  # thresholds tried: after so many of these


@functools.cache
def _edges() -> tuple[Tensor, Tensor]:
    """The least and the greatest magnitude of bins 0 .. 0x7F7F, float64."""
    low = torch.arange(0x7F80, dtype=torch.int32) << 16
    high = low | 0xFFFF
    return low.view(torch.float32).double(), high.view(torch.float32).double()


class Histogram:
    """Counts of the numbers of tensors, with the least and the greatest of them.

    Args:
        device: where the counts lie; that of the tensors.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        """int64 [65536], by the first 16 bits of a number's fp32 pattern."""
        self.lowest = torch.tensor(math.inf, device=device)
        """fp32 [], the least number; inf before there is one."""
        self.highest = torch.tensor(-math.inf, device=device)
        """fp32 [], the greatest number."""

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Count the numbers of x.

        Args:
            x: floating point, of any shape; counted as fp32.

        Raises:
            ValueError: for a number that is not finite; nothing is counted then.
        """
        if not x.numel():
            return
        wide = x.detach().float().reshape(-1)
        lowest, highest = torch.aminmax(wide)
        if not bool(torch.isfinite(lowest) & torch.isfinite(highest)):
            raise ValueError(
                f"x of shape {list(x.shape)} has a number that is not finite; look at the model or "
                "at the examples"
            )
        bins = (wide.view(torch.int32) >> 16) & 0xFFFF
        self.counts += torch.bincount(bins, minlength=BINS)
        self.lowest = torch.minimum(self.lowest, lowest)
        self.highest = torch.maximum(self.highest, highest)

    def reduce(self, ranks: Ranks) -> None:
        """Add what other ranks have counted; afterwards all have the same. Collective.

        Args:
            ranks: those that counted.
        """
        self.counts = summed(self.counts, ranks)
        self.lowest, self.highest = least(self.lowest, ranks), greatest(self.highest, ranks)

    def __len__(self) -> int:
        return int(self.counts.sum())

    def _magnitudes(self) -> tuple[Tensor, Tensor]:
        """float64 counts of the magnitudes 0 .. 0x7F7F, and the number that stands for each bin."""
        half = BINS // 2
        counts = (self.counts[:half] + self.counts[half:]).cpu()[:0x7F80]
        low, high = _edges()
        return counts, (low + high) / 2

    def magnitude(self) -> float:
        """The largest |x|; 0 where there is none."""
        return max(0.0, float(self.highest), -float(self.lowest)) if len(self) else 0.0

    def quantile(self, q: float) -> float:
        """The least number that q of all numbers do not exceed, within one bin: its greatest, and
        never beyond the greatest number seen.

        Args:
            q: 0 to 1.
        """
        negative = self.counts[BINS // 2 :].cpu()[:0x7F80].flip(0)
        ordered = torch.cat([negative, self.counts[: BINS // 2].cpu()[:0x7F80]])
        low, high = _edges()
        ends = torch.cat([-low.flip(0), high])
        place = int(torch.searchsorted(ordered.cumsum(0), _rank(q, len(self))))
        return min(max(float(ends[place]), float(self.lowest)), float(self.highest))

    def magnitude_quantile(self, q: float) -> float:
        """The same of |x|.

        Args:
            q: 0 to 1.
        """
        counts, _ = self._magnitudes()
        place = int(torch.searchsorted(counts.cumsum(0), _rank(q, len(self))))
        return min(float(_edges()[1][place]), self.magnitude())

    def clip_of_least_error(self, format: Format) -> float:
        """The fraction of the range, 0.20 to 1.00 in hundredths, with the least sum of squared
        errors (x - Q(x))^2 over the bins.

        Args:
            format: what numbers are rounded to.
        """
        counts, centers = self._magnitudes()
        used = counts.nonzero().flatten()
        if format.symmetric:
            numbers, weights = centers[used], counts[used].double()
        else:
            numbers = torch.cat([-centers[:0x7F80], centers])
            weights = torch.cat([self.counts[BINS // 2 :][:0x7F80], self.counts[:0x7F80]]).cpu()
            used = weights.nonzero().flatten()
            numbers, weights = numbers[used], weights[used].double()
        low, high = (float(end) for end in code_range(format))
        errors = []
        for hundredths in CLIPS:
            lowest, highest = (torch.tensor(end) for end in self.range(format, hundredths / 100))
            scale, zero = scales_of(lowest, highest, format)
            s, z = float(scale), 0.0 if zero is None else float(zero)
            ratio = numbers / s if s > 0 else torch.zeros_like(numbers)
            back = s * (ratio.round() + z).clamp(low, high).sub(z)
            errors.append(float(((numbers - back).square() * weights).sum()))
        return CLIPS[errors.index(min(errors))] / 100

    def range(self, format: Format, fraction: float = 1.0) -> tuple[float, float]:
        """The least and the greatest number as `scales_of` takes them, times `fraction`.

        Args:
            format: what numbers are rounded to.
            fraction: of the range that is kept.
        """
        if format.symmetric:
            most = self.magnitude()
            return -fraction * most, fraction * most
        lowest, highest = min(float(self.lowest), 0.0), max(float(self.highest), 0.0)
        return fraction * lowest, fraction * highest

    def clip_of_least_divergence(self, levels: int) -> float:
        """The fraction of the largest magnitude whose distribution, clipped and rounded to so many
        levels, has the least KL divergence from what was seen (Migacz, 2017, "8-bit inference with
        TensorRT").

        Magnitudes lie in 2048 equal bins, over which a bin of bit patterns is spread evenly; every
        16th threshold from `levels` bins on is tried.

        Args:
            levels: magnitudes that codes have, 128 for int8.
        """
        seen = self._equal_bins()
        best, found = math.inf, 1.0
        for kept in range(min(levels, LINEAR), LINEAR + 1, EVERY):
            divergence = _divergence(seen, kept, levels)
            if divergence < best:
                best, found = divergence, kept / LINEAR
        return found

    def _equal_bins(self) -> Tensor:
        """Counts of magnitudes in LINEAR equal bins up to the largest, float64."""
        most, (counts, _) = self.magnitude(), self._magnitudes()
        low, high = _edges()
        up_to = torch.cat([torch.zeros(1, dtype=torch.float64), counts.double().cumsum(0)])
        ends = torch.linspace(0, most, LINEAR + 1, dtype=torch.float64)
        # What lies below each end: whole bins of patterns, and the part of the one it falls into
        place = torch.searchsorted(high, ends).clamp_max(len(high) - 1)
        top = torch.minimum(high[place], torch.tensor(most, dtype=torch.float64))
        wide = top > low[place]
        part = torch.where(wide, (ends - low[place]) / (top - low[place]).clamp_min(1e-300), 1.0)
        part = part.clamp(0, 1)
        below = up_to[place] + part * counts[place]
        below[0] = 0.0
        return below.diff()


def _rank(q: float, n: int) -> int:
    """Which of n numbers in order is the q-quantile, counted from 1."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"q is {q}; a quantile is of 0 to 1")
    if not n:
        raise ValueError("nothing was counted; update the histogram with numbers first")
    return min(n, max(1, math.ceil(q * n)))


def _divergence(seen: Tensor, kept: int, levels: int) -> float:
    """KL divergence of the first `kept` bins, with all that is beyond in the last one, from their
    mean over `levels` stretches."""
    own = seen[:kept]
    clipped = own.clone()
    clipped[-1] += seen[kept:].sum()
    stretch = torch.arange(kept) * levels // kept
    filled = own > 0
    total = torch.zeros(levels, dtype=torch.float64).index_add_(0, stretch, own)
    count = torch.zeros(levels, dtype=torch.float64).index_add_(0, stretch, filled.double())
    rounded = torch.where(filled, (total / count.clamp_min(1))[stretch], 0.0)
    p, q = clipped / clipped.sum(), rounded / rounded.sum().clamp_min(1e-300)
    both = (p > 0) & (q > 0)
    lost = p[(p > 0) & ~both].sum()  # all that is clipped away where nothing was: no finite answer
    if lost > 0:
        return math.inf
    return float((p[both] * (p[both] / q[both]).log()).sum())
