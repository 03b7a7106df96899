"""The rank that takes longer for its own work than the others, named while they train.

step of rank 2   |---- own work ----|-- waits in collectives --|
                  ^ this is compared: waits, which a slow rank causes, are left out
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Stragglers"]


@dataclass
class Stragglers:
    """Compares the ranks' own seconds of each window of steps.

    A rank is named once, when its score, the fastest rank's seconds over its own, was below
    `threshold` in so many windows in a row; and again, when that has happened anew after a window
    without.
    """

    threshold: float = 0.9
    """A score below this is slow."""
    windows: int = 3
    """In a row, before a rank is named."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"threshold is {self.threshold}; give a number between 0 and 1")
        if self.windows < 1:
            raise ValueError(f"windows is {self.windows}; give 1 or more")
        self._in_a_row: dict[int, int] = {}
        self._usual: dict[int, list[float]] = {}

    def update(self, seconds: Sequence[float], *, hosts: Sequence[str] = ()) -> list[str]:
        """What there is to say after another window.

        Args:
            seconds: The median own time of a step in the window, by rank.
            hosts: The names of the ranks' hosts, by rank, where they are known.
        """
        fastest = min(seconds)
        said = []
        for rank, own in enumerate(seconds):
            score = fastest / own if own > 0 else 1.0
            before = self._usual.setdefault(rank, [])
            self._in_a_row[rank] = self._in_a_row.get(rank, 0) + 1 if score < self.threshold else 0
            if self._in_a_row[rank] == self.windows:
                where = f" on {hosts[rank]}" if hosts else ""
                said.append(
                    f"rank {rank}{where} is slow: {own:.3g} s of its own work in a step, the "
                    f"fastest rank {fastest:.3g} s{_history(own, before[: -self.windows + 1])}"
                )
            before.append(own)
        return said


def _history(own: float, before: Sequence[float]) -> str:
    """Whether the rank has always been so."""
    if len(before) < 3:
        return ""
    usual = statistics.median(before)
    if own > 1.1 * usual:
        return f"; it took {usual:.3g} s before"
    return "; it has been so all the time"
