"""UnitTrace: the order in which units were needed the last time, by which the next one is gathered
ahead."""

from __future__ import annotations

from pyops.zero.hooks.sharded_unit import ShardedUnit

__all__ = ["UnitTrace"]

LONGEST = 10_000  # turns of units that are remembered


class UnitTrace:
    """The order of units in a phase, remembered from the last time."""

    def __init__(self) -> None:
        self._known: list[ShardedUnit] = []
        self._now: list[ShardedUnit] = []
        self._at = 0

    def begin(self) -> None:
        """Begin the phase anew; the order of the one that ends is remembered."""
        if self._now:
            self._known = self._now
        self._now, self._at = [], 0

    def first(self) -> ShardedUnit | None:
        """The unit that the last phase began with."""
        return self._known[0] if self._known else None

    def soon(self) -> list[ShardedUnit]:
        """The two that are expected next."""
        return self._known[self._at : self._at + 2]

    def after(self, unit: ShardedUnit) -> ShardedUnit | None:
        """Note that it is the unit's turn; the one that is expected next."""
        if len(self._now) >= LONGEST:
            self.begin()  # forwards of parts only, which no step ever ends
        self._now.append(unit)
        for at in range(self._at, len(self._known)):
            if self._known[at] is unit:
                self._at = at + 1
                return self._known[at + 1] if at + 1 < len(self._known) else None
        return None
