"""Turns: pushes come over a shard's link a few at a time, in the order in which replicas ask.

    together     replica 0 |=== push ===|-- fetch --|     each direction of the link is idle while
                 replica 1 |=== push ===|-- fetch --|     the other is full
    in turns     replica 0 |= push =|-- fetch --|
                 replica 1          |= push =|-- fetch --|

How many at a time is found by trial: one where the shard's own link is the narrow one, more where
the links of the replicas are.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

__all__ = ["Turns", "Width"]

UNKNOWN = 1.0  # seconds of a turn, as long as none has ended
PATIENCE, GRACE = 2.0, 0.05  # of the fastest turn, and seconds beside it
WINDOW = 8  # turns of which a rate is taken
FIRST, LONGEST = 4, 64  # windows from one trial to the next: at first, and at most
BETTER, AS_GOOD = 1.15, 0.95  # of the rate before a trial


class Width:
    """How many turns at a time bring the most bytes a second. Now and then another number is tried
    for a window, one more and one less in turn, ever more seldom as long as nothing is gained.

    Attributes:
        turns: The number, 1 or more.
    """

    def __init__(self) -> None:
        self.turns = 1
        self._rate = 0.0
        self._trial, self._next = 0, 1
        self._pause = self._windows = FIRST  # from one trial to the next; until the next

    def measured(self, rate: float) -> None:
        """Take the bytes a second of a window, in which `turns` was the number."""
        if self._trial:
            kept = rate > self._rate * (BETTER if self._trial > 0 else AS_GOOD)
            if not kept:
                self.turns -= self._trial
                self._next = -self._trial
            self._pause = 1 if kept else min(2 * self._pause, LONGEST)
            self._trial, self._windows = 0, self._pause
            return
        self._rate = rate
        self._windows -= 1
        if self._windows <= 0:
            self._trial = self._next if self.turns > 1 else 1
            self.turns += self._trial


class Turns:
    """Who may send to this process now. A turn that takes PATIENCE times as long as the fastest one
    would lets the next begin beside it: a slow replica holds nobody up for long."""

    def __init__(self) -> None:
        self.width = Width()
        self._changed = threading.Condition()
        self._turns: dict[object, float] = {}  # when each is late; inf before it begins
        self._fastest = math.inf  # seconds a byte
        self._active = self._ended = self._bytes = 0
        self._busy = self._since = 0.0

    @contextlib.contextmanager
    def turn(self, nbytes: int) -> Iterator[None]:
        """Wait for a turn, within which so many bytes are received."""
        mine = object()
        with self._changed:
            ahead = list(self._turns)
            self._turns[mine] = math.inf
            while (left := self._left(ahead)) > 0:
                self._changed.wait(None if left == math.inf else left)
            begin = time.monotonic()
            seconds = UNKNOWN if self._fastest == math.inf else self._fastest * nbytes
            self._turns[mine] = begin + PATIENCE * seconds + GRACE
            self._since = self._since if self._active else begin
            self._active += 1
        received = 0
        try:
            yield
            received = nbytes
        finally:
            with self._changed:
                del self._turns[mine]
                self._end(received, begin)
                self._changed.notify_all()

    def _left(self, ahead: list[object]) -> float:
        """Seconds until fewer of the turns ahead than may be at a time are not over, nor late."""
        ends = sorted((self._turns[each] for each in ahead if each in self._turns), reverse=True)
        place = self.width.turns - 1
        return ends[place] - time.monotonic() if place < len(ends) else 0.0

    def _end(self, received: int, begin: float) -> None:
        """Count a turn."""
        now = time.monotonic()
        self._active -= 1
        self._busy, self._since = self._busy + now - self._since, now
        if not received:
            return
        self._fastest = min(self._fastest, (now - begin) / received)
        self._bytes += received
        self._ended += 1
        if self._ended == WINDOW:
            self.width.measured(self._bytes / max(self._busy, 1e-9))
            self._ended, self._bytes, self._busy = 0, 0, 0.0
