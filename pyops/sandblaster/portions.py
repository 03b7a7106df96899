"""Portions of a batch: which worker computes which one next, and backup copies of the last ones.

    units     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |       much smaller than a worker's share
    worker 0    0   1           4                     goes on where its last unit ended
    worker 1            2   3       5
    worker 2                            6             is slow: a free worker computes 6, too,
                                            7         and the first answer counts

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.2; the backup copies are
those of MapReduce (Dean and Ghemawat, OSDI 2004, section 3.6).
"""

from __future__ import annotations

from itertools import count

__all__ = ["Portions"]


class Portions:
    """The units of one pass over the batch. A unit is what a worker computes before it answers.

    Args:
        units: How many there are, numbered from 0.
        backups: Whether units that are out are handed out again when none is free.

    Attributes:
        again: Units that were handed out a second time, or more often.
    """

    def __init__(self, units: int, *, backups: bool = True) -> None:
        self.units, self.backups = units, backups
        self.again = 0
        self._free = set(range(units))
        self._out: dict[int, dict[int, int]] = {}  # unit: {worker: turn}
        self._last: dict[int, int] = {}
        self._turns = count()

    @property
    def over(self) -> bool:
        """Whether every unit has its answer."""
        return not self._free and not self._out

    def take(self, worker: int) -> int | None:
        """The next unit of a worker; None where there is none for it now."""
        following = self._last.get(worker, -2) + 1
        if self._free:
            unit = following if following in self._free else min(self._free)
            self._free.remove(unit)
        else:
            others = [unit for unit, holders in self._out.items() if worker not in holders]
            if not self.backups or not others:
                return None
            # The fewest copies first, then the one that has been out for longest.
            unit = min(others, key=lambda u: (len(self._out[u]), min(self._out[u].values())))
            self.again += 1
        self._out.setdefault(unit, {})[worker] = next(self._turns)
        self._last[worker] = unit
        return unit

    def finish(self, unit: int) -> bool:
        """Note an answer; says whether it is the first one for this unit."""
        if unit in self._free:  # its worker had been given up, and answers after all
            self._free.remove(unit)
            return True
        return self._out.pop(unit, None) is not None

    def lose(self, worker: int) -> None:
        """Hand out again what a worker had that is gone."""
        for unit in [unit for unit, holders in self._out.items() if worker in holders]:
            del self._out[unit][worker]
            if not self._out[unit]:
                del self._out[unit]
                self._free.add(unit)
                self.again += 1
        self._last.pop(worker, None)
