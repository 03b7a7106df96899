"""The strong Wolfe conditions: which step lengths are tried along a direction, given losses and
slopes alone.

    search = strong_wolfe(loss, slope, first=1.0, largest=d.abs().max(), trials=25)
    trial = next(search)
    while True:
        trial = search.send((loss_at(trial.step), slope_at(trial.step)))     # ends: StopIteration

    loss(t) <= loss(0) + c1 t slope(0)       and       |slope(t)| <= c2 |slope(0)|

A bracket is found by cubic extrapolation, and made smaller by cubic interpolation (Nocedal and
Wright, Numerical Optimization, algorithms 3.5 and 3.6). It decides as torch.optim.LBFGS does, so
that both take the same steps, but in two cases: a loss that is not finite counts as larger than any
other, and the good end of a bracket is never one whose loss has not fallen enough.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Search", "Trial", "strong_wolfe"]

C1, C2 = 1e-4, 0.9
GROWTH = 10.0  # of a step at most, and LEAST of the last one's increase at least, in extrapolation
LEAST = 0.01
MARGIN = 0.1  # of a bracket, from its ends, that a trial keeps when interpolation stalls there


@dataclass(frozen=True)
class Trial:
    """What the search asks for.

    Attributes:
        step: At this step length.
        held: Step lengths that may still be chosen, whose gradients are to be kept; 0 always may.
    """

    step: float
    held: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A step length, and the loss and the slope there."""

    step: float
    loss: float
    slope: float


Search: TypeAlias = Generator[Trial, tuple[float, float], float]


def strong_wolfe(
    loss: float,
    slope: float,
    *,
    first: float,
    largest: float,
    trials: int,
    tolerance_change: float = 1e-9,
) -> Search:
    """Search a step length; send it the loss and the slope at each trial that it yields.

    Args:
        loss: At step length 0.
        slope: Of the loss along the direction there, less than 0.
        first: The first trial.
        largest: The largest absolute component of the direction.
        trials: How many more trials there may be after the first.
        tolerance_change: A bracket in which no parameter moves as far is small enough.

    Returns:
        The step length, 0 where no trial was better than staying.
    """
    start = Point(0.0, loss, slope)
    bracket, done, used = yield from _bracketed(start, first, trials)
    if used == trials:
        bracket, done = [start, bracket[-1]], True
    stalled = False
    while not done and used < trials:
        low, high = _ordered(bracket, start)
        if abs(low.step - high.step) * largest < tolerance_change:
            break
        step, stalled = _inside(bracket, stalled)
        point = yield from _asked(step, bracket)
        used += 1
        if _above(point, start) or point.loss >= low.loss:
            bracket[bracket.index(high)] = point
            continue
        done = abs(point.slope) <= -C2 * slope
        if not done and point.slope * (high.step - low.step) >= 0:
            bracket[bracket.index(high)] = low
        place = next(place for place, each in enumerate(bracket) if each is low)
        bracket[place] = point
        if done:
            return point.step
    return _ordered(bracket, start)[0].step


def _bracketed(
    start: Point, first: float, trials: int
) -> Generator[Trial, tuple[float, float], tuple[list[Point], bool, int]]:
    """(points around a good one, or the good one; whether it is; trials used)."""
    before, used = start, 0
    point = yield from _asked(first, [start])
    while used < trials:
        if _above(point, start) or (used > 1 and point.loss >= before.loss):
            return [before, point], False, used
        if abs(point.slope) <= -C2 * start.slope:
            return [point], True, used
        if point.slope >= 0:
            return [before, point], False, used
        least = point.step + LEAST * (point.step - before.step)
        step = _cubic(before, point, (least, point.step * GROWTH))
        before = point
        point = yield from _asked(step, [before])
        used += 1
    return [before, point], False, used


def _asked(step: float, kept: list[Point]) -> Generator[Trial, tuple[float, float], Point]:
    loss, slope = yield Trial(step, tuple(point.step for point in kept))
    return Point(step, loss if math.isfinite(loss) else math.inf, slope)


def _above(point: Point, start: Point) -> bool:
    """Whether the loss has not fallen enough."""
    return point.loss > start.loss + C1 * point.step * start.slope


def _ordered(bracket: list[Point], start: Point) -> tuple[Point, Point]:
    """(the better end, the other): that whose loss has fallen enough, or the lower one."""
    first, last = bracket[0], bracket[-1]
    worse = (_above(first, start), first.loss) > (_above(last, start), last.loss)
    return (last, first) if worse else (first, last)


def _inside(bracket: list[Point], stalled: bool) -> tuple[float, bool]:
    """(the next trial within a bracket, whether it is near an end)."""
    low, high = sorted(point.step for point in bracket)
    step = _cubic(bracket[0], bracket[1], (low, high))
    margin = MARGIN * (high - low)
    if min(high - step, step - low) >= margin:
        return step, False
    if stalled or step >= high or step <= low:
        return (high - margin if abs(step - high) < abs(step - low) else low + margin), False
    return step, True


def _cubic(a: Point, b: Point, bounds: tuple[float, float]) -> float:
    """Where the cubic through both points has its minimum, within bounds; their middle where there
    is none."""
    middle = (bounds[0] + bounds[1]) / 2
    if a.step == b.step or not all(map(math.isfinite, (a.loss, b.loss, a.slope, b.slope))):
        return middle
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return middle
    if a.step > b.step:
        a, b = b, a
    d2 = math.sqrt(square)
    divisor = b.slope - a.slope + 2 * d2
    if divisor == 0:
        return middle
    step = b.step - (b.step - a.step) * ((b.slope + d2 - d1) / divisor)
    return min(max(step, bounds[0]), bounds[1])
