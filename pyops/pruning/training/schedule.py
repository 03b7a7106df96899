"""How sparse a model is to be after how many steps (Zhu and Gupta, 2017, section 3).

    s_t = s_f + (s_i - s_f) (1 - (t - t0) / (n D))^3        t = t0, t0 + D, ..., t0 + n D

Steep at first, when much can go, and flat towards the end.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from pyops.given_numbers import check_number, check_whole

__all__ = ["CubicSchedule"]


@dataclass(frozen=True)
class CubicSchedule:
    """The sparsity after each step.

    Raises:
        ValueError: For shares out of range, a final one below the initial one, and numbers of steps
            that make no sense.
    """

    final: float
    """The sparsity at the end, s_f."""
    begin: int
    """After this many steps the first mask is made, t0."""
    every: int
    """Steps from one mask to the next, D."""
    times: int
    """Masks after the first one, n."""
    initial: float = 0.0
    """The sparsity of the first mask, s_i."""
    total_steps: int | None = None
    """Steps of the training; a warning says where the schedule ends after it."""

    def __post_init__(self) -> None:
        for name in ("initial", "final"):
            check_number(
                name, getattr(self, name), lambda v: 0 <= v <= 1, "give shares from 0 to 1"
            )
        for name, least in (("begin", 0), ("every", 1), ("times", 1)):
            check_whole(name, getattr(self, name), least=least)
        if self.total_steps is not None:
            check_whole("total_steps", self.total_steps, least=1)
        if not self.initial <= self.final:
            raise ValueError(
                f"initial is {self.initial} and final {self.final}; give shares from 0 to 1, the "
                "final one not below the initial one"
            )
        if self.total_steps is not None and self.end > self.total_steps:
            fitting = max(1, (self.total_steps - self.begin) // self.every)
            warnings.warn(
                f"the schedule ends after step {self.end}, the training after "
                f"{self.total_steps}: a sparsity of {self.at(self.total_steps):.4g} is reached, "
                f"not {self.final}; give times={fitting}",
                stacklevel=3,
            )

    @property
    def end(self) -> int:
        """The step after which the last mask is made."""
        return self.begin + self.every * self.times

    def at(self, step: int) -> float:
        """The sparsity of the mask in force after `step` steps: of the last one made; before the
        first one `initial`."""
        made = min(max(step - self.begin, 0) // self.every, self.times)
        if made in (0, self.times):
            return self.final if made else self.initial
        return self.final + (self.initial - self.final) * (1.0 - made / self.times) ** 3

    def due(self, step: int) -> bool:
        """Whether a mask is made after `step` steps."""
        return self.begin <= step <= self.end and (step - self.begin) % self.every == 0
