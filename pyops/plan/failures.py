"""How often a run is interrupted, how often to save, and what is lost.

    |--save--|------ interval ------|--save--|--- half an interval lost ---X--restart--|

C seconds that a save stops the run, R of a restart, T between failures: the interval is sqrt(2 C T)
(Young, 1974), and the part C / interval + (interval / 2 + R) / T of the time is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pyops.plan.shapes import PlanError

__all__ = ["Failures", "spares"]

HOUR = 3600.0
SAVE_SECONDS, RESTART_SECONDS = 60.0, 600.0


@dataclass(frozen=True)
class Failures:
    """The failures of a run.

    Raises:
        PlanError: For a value that makes no sense.
    """

    num_devices: int
    """Of which any ends the run."""
    device_hours: float
    """Between two failures of one device."""
    save_seconds: float = SAVE_SECONDS
    """C: that a save stops the run. A save in the background has a tenth of it."""
    restart_seconds: float = RESTART_SECONDS
    """R: from a failure to the first step."""

    def __post_init__(self) -> None:
        if isinstance(self.num_devices, bool) or not self.num_devices >= 1:
            raise PlanError(f"num_devices is {self.num_devices!r}; give a whole number, 1 or more")
        for name in ("device_hours", "save_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise PlanError(f"{name} is {getattr(self, name)!r}; give a number above 0")
        if not (math.isfinite(self.restart_seconds) and self.restart_seconds >= 0):
            raise PlanError(f"restart_seconds is {self.restart_seconds!r}; give 0 or more")

    @property
    def between(self) -> float:
        """T: seconds from one failure of the run to the next."""
        return self.device_hours * HOUR / self.num_devices

    @property
    def interval(self) -> float:
        """Seconds from one save to the next that lose least (Young)."""
        return math.sqrt(2.0 * self.save_seconds * self.between)

    @property
    def exact_interval(self) -> float:
        """That which gives most availability, where failures are frequent: C + sqrt(2 (T + R) C +
        C^2) (Saxena et al., arXiv:2410.18124)."""
        c = self.save_seconds
        return c + math.sqrt(2.0 * (self.between + self.restart_seconds) * c + c * c)

    def lost(self, interval: float | None = None) -> float:
        """The part of the time that saves, lost work and restarts take.

        Args:
            interval: Seconds from one save to the next; None: `interval`.
        """
        return sum(self.parts(interval).values())

    def parts(self, interval: float | None = None) -> dict[str, float]:
        """`lost`, by what takes it.

        Args:
            interval: Seconds from one save to the next; None: `interval`.

        Raises:
            PlanError: The interval is not above 0.
        """
        interval = self.interval if interval is None else interval
        if not interval > 0:
            raise PlanError(f"interval is {interval!r}; give seconds, above 0")
        return {
            "saves": self.save_seconds / interval,
            "lost work": interval / 2.0 / self.between,
            "restarts": self.restart_seconds / self.between,
        }

    def expected(self, seconds: float) -> float:
        """Failures in a run of so many seconds."""
        return seconds / self.between


def spares(failures: Failures, *, repair_hours: float, confidence: float = 0.99) -> int:
    """Spare devices that are enough while others are repaired, by Poisson's distribution.

    Args:
        failures: Of the run.
        repair_hours: Until a device is back.
        confidence: The part of the time for which they must be enough.

    Raises:
        PlanError: For a value that makes no sense.
    """
    if not (math.isfinite(repair_hours) and repair_hours >= 0):
        raise PlanError(f"repair_hours is {repair_hours!r}; give a number, 0 or more")
    if not 0 < confidence < 1:
        raise PlanError(
            f"confidence is {confidence!r}; give a number between 0 and 1, such as 0.99"
        )
    mean = failures.expected(repair_hours * HOUR)
    number, term = 0, math.exp(-mean)
    covered = term
    while covered < confidence and number < 10 * mean + 100:
        number += 1
        term *= mean / number
        covered += term
    return number
