"""When the first phase ends: after a number of steps, or when the variance no longer changes.

|v|_1        .-----.
           .'       '-.___
         .'               '------------------    "auto": the sum of the bias-corrected second moment differs by less
step  ---+------+-----------+------|                     than 4 % from what it was 1 / (1 - beta2) steps ago
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Any

__all__ = ["Warmup", "logger"]

logger = logging.getLogger("pyops")

THRESHOLD = 0.96
SAMPLES = 100  # of the second moment, over 1 / (1 - beta2) steps


class Warmup:
    """Decides after each step of the first phase whether it was the last.

    steps: how many there are, at least 1, or "auto": the rule of 1-bit Adam, arXiv:2102.02888,
    section 7.1, with the ratio of the smaller to the larger sum. beta2: gives "auto" its distance.
    total_steps: of the run, at least 1, or None. Raises ValueError for anything else.
    """

    def __init__(
        self, steps: int | str, *, beta2: float, total_steps: int | None, who: str
    ) -> None:
        if isinstance(steps, bool) or not (
            steps == "auto" or (isinstance(steps, int) and steps >= 1)
        ):
            raise ValueError(
                f"{who}: warmup_steps={steps!r} must be a number of steps, at least 1 "
                "(without any there is no variance to "
                'keep), or "auto"; 15 to 25 % of the run is a good choice'
            )
        if total_steps is not None and (type(total_steps) is not int or total_steps < 1):
            raise ValueError(
                f"{who}: total_steps={total_steps!r} must be the run's number of steps, "
                "at least 1, or None"
            )
        if isinstance(steps, int) and total_steps is not None and steps >= total_steps:
            logger.warning(
                "%s: warmup_steps=%d is not less than total_steps=%d: every step is "
                "exact and nothing will be compressed; "
                "15 to 25 %% of the run is a good choice",
                who,
                steps,
                total_steps,
            )
        self.steps = steps
        distance = max(1, round(1 / (1 - beta2)))
        self.every = max(1, distance // SAMPLES)
        self._sums: deque[float] = deque(maxlen=distance // self.every + 1)

    def wants_sum(self, step: int) -> bool:
        """Whether `ended` of this step needs the sum of the second moment."""
        return self.steps == "auto" and step % self.every == 0

    def ended(self, step: int, variance_sum: float | None) -> bool:
        """Whether the step of this number, counted from 1, was the last of the first phase; the sum
        is that which it found."""
        if isinstance(self.steps, int):
            return step >= self.steps
        if variance_sum is None:
            return False
        self._sums.append(variance_sum)
        if len(self._sums) < (self._sums.maxlen or 0):
            return False
        low, high = sorted((self._sums[0], self._sums[-1]))
        return high > 0 and low / high >= THRESHOLD

    def state_dict(self) -> dict[str, Any]:
        return {"variance_sums": list(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums = deque(state["variance_sums"], maxlen=self._sums.maxlen)
