"""Mixture: which of several sources each position of an endless sequence is from, by weights.

    weights 0.5, 0.3, 0.2      period of 10 positions: a b a c a b a c b a   (5, 3, 2 of them)
    position i                 source = period[i mod 10], and which of the source's own it is

The sources of a period are spread by Tijdeman's rule (The chairman assignment problem, 1980): after
any number i of positions, each source with the part w was taken w * i times to within 1. A position
is found without those before it, so a run goes on anywhere with nothing but the position.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

__all__ = ["Mixture"]

MOST_POSITIONS = 1 << 16  # of a period; parts are rounded to it where they need more


class Mixture:
    """The source of each position, a function of the weights alone.

    Args:
        weights: Of the sources, each more than 0; only their ratios count.

    Attributes:
        counts: How many positions of a period each source has, int64 [sources].
        period: The number of positions after which the sources are in the same order again.

    Raises:
        ValueError: Without weights, when one is not above 0 and finite, or when there are more than
            65,536.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not 1 <= len(weights) <= MOST_POSITIONS:
            raise ValueError(f"there are {len(weights)} weights; give 1 to {MOST_POSITIONS}")
        for i, weight in enumerate(weights):
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(
                    f"weight {i} is {weight}; give a number above 0, or leave that source out"
                )
        counts = _whole(weights)
        self.counts, self.period = np.array(counts, dtype=np.int64), sum(counts)
        self._source = _spread(counts)
        self._number = np.empty(self.period, dtype=np.int64)  # of those of its source in a period
        for source, count in enumerate(counts):
            self._number[self._source == source] = np.arange(count)

    def __call__(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where these positions are from.

        Args:
            positions: Whole numbers, 0 or more: [n].

        Returns:
            The source of each, and how many positions before it were from this source: int64 [n],
            both.
        """
        periods, place = np.divmod(np.asarray(positions, dtype=np.int64), self.period)
        source = self._source[place]
        return source, periods * self.counts[source] + self._number[place]


def _whole(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the ratio of the weights as they are written in decimal, or the nearest to
    it whose sum is at most `MOST_POSITIONS`."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    scale = math.lcm(*(part.denominator for part in parts))
    if scale <= MOST_POSITIONS:
        return [int(part * scale) for part in parts]
    # At least one each; of the others, the largest remainders are rounded up.
    wanted = [part * (MOST_POSITIONS - len(parts)) for part in parts]
    counts = [math.floor(each) for each in wanted]
    left = MOST_POSITIONS - len(parts) - sum(counts)
    by_rest = sorted(range(len(parts)), key=lambda i: (counts[i] - wanted[i], i))
    for i in by_rest[:left]:
        counts[i] += 1
    return [count + 1 for count in counts]


def _spread(counts: Sequence[int]) -> np.ndarray:
    """The source of each position of a period: of those whose next turn has come, the one that has
    to come soonest. In whole numbers: the deficit of a source at position t (from 1) is
    (counts t - total taken) / total; its turn has come at 1 / (2 k - 2), and is over at
    1 - 1 / (2 k - 2)."""
    total, room = sum(counts), max(2 * len(counts) - 2, 1)
    found = np.empty(total, dtype=np.int64)
    if len(counts) == 1:
        found[:] = 0
        return found
    taken = [0] * len(counts)

    def turn(source: int) -> tuple[int, int]:
        """The first and the last position at which the source's next turn can be."""
        before, count = taken[source] * room * total, counts[source] * room
        return -(-(before + total) // count), (before + total * (room - 1)) // count

    waiting = [(*turn(source), source) for source in range(len(counts))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    for place in range(1, total + 1):
        while waiting and (waiting[0][0] <= place or not ready):
            _, last, source = heapq.heappop(waiting)
            heapq.heappush(ready, (last, source))
        _, source = heapq.heappop(ready)
        found[place - 1] = source
        taken[source] += 1
        if taken[source] < counts[source]:
            heapq.heappush(waiting, (*turn(source), source))
    return found
