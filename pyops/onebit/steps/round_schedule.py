"""Which steps of 0/1 Adam communicate what; pure arithmetic.

    step       1 2 .. k | k+2 k+4 .. |                  var_freeze_step |
    exact      x x .. x |  x   x  .. |  x       x      ..             x |
    compressed x x .. x | x x x x .. | x x x x x x x   ..   x x x x x x | x x x x   x   x   x     x
    local                                                               |         x   x   x   xxx

    intervals of exact rounds: 1, 2, 4 ..., each k times

k = var_update_scaler. An exact round is the variance's, besides the compressed one; the freeze step
has one too. After it, intervals double every local_step_scaler steps, up to local_step_clipper.
Lu et al., 0/1 Adam, arXiv:2202.06009, section 6 (T_v: differences 2^floor(j / k); T_u: doubling,
capped).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["COMPRESSED", "EXACT", "LOCAL", "RoundSchedule", "Rounds"]

EXACT, COMPRESSED, LOCAL = "exact", "compressed", "local"


class Rounds(NamedTuple):
    """How many steps communicate exactly besides, only compressed, or not at all."""

    exact: int
    compressed: int
    local: int


@dataclass(frozen=True)
class RoundSchedule:
    """ValueError for numbers below 1."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number of at least 1")

    def kind(self, step: int) -> str:
        """What the step of this number, counted from 1, communicates."""
        if step <= self.var_freeze_step:
            return EXACT if step == self.var_freeze_step or self._is_update(step) else COMPRESSED
        return COMPRESSED if self._is_sync(step - self.var_freeze_step) else LOCAL

    def _is_update(self, step: int) -> bool:
        start, interval = 0, 1
        while step > start + interval * self.var_update_scaler:
            start, interval = start + interval * self.var_update_scaler, 2 * interval
        return (step - start) % interval == 0

    def _is_sync(self, step: int) -> bool:
        """step: counted from the freeze. Intervals of one length follow each other until the next
        length begins."""
        at = 0
        while at < step:
            doublings = min(at // self.local_step_scaler, 64)
            interval = min(self.local_step_clipper, 2**doublings)
            last = interval == self.local_step_clipper
            left = step - at if last else (doublings + 1) * self.local_step_scaler - at
            many = max(1, min(-(-left // interval), (step - at) // interval))
            at += many * interval
        return at == step

    def rounds(self, steps: int) -> Rounds:
        """Of a run of so many steps."""
        kinds = [self.kind(step) for step in range(1, steps + 1)]
        return Rounds(kinds.count(EXACT), kinds.count(COMPRESSED), kinds.count(LOCAL))

    def bytes_ratio(self, steps: int, *, payload: float, exact_payload: float) -> float:
        """What such a run sends, in parts of an fp32 all-reduce in each step.

        Args:
            payload: Of a compressed round, exact_payload: of what an exact one sends besides,
                likewise.
        """
        exact, compressed, _ = self.rounds(steps)
        return (exact_payload * exact + payload * (exact + compressed)) / steps
