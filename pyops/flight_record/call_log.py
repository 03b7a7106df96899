"""The calls of a flight record, in the memory of its file: the class that pyops/_native has in C++
(csrc/native/call_log.cpp), in Python for an installation without kernels.

memory    | header | entry 1 | entry 2 | ... | entry n |      call n + 1 takes the place of call 1
"""

from __future__ import annotations

import mmap
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

from pyops.flight_record.frames import described, user_frame, whose
from pyops.ops.library import native

__all__ = [
    "ENTRY",
    "FAILED",
    "FINISHED",
    "RUNNING",
    "CallLog",
    "Kind",
    "PythonCallLog",
    "Runner",
    "call_log",
]

Kind = Callable[[int], int]
"""Notes that a call of some bytes begins where this is called; returns its number, or 0 within a
call that is already noted, and then notes nothing."""
Runner = Callable[[int, Callable[[], Any]], Any]
"""Runs what is given between `enter` and `leave`, and notes the end of the call of that number; 0:
of none."""

ENTRY = struct.Struct("<QQddIiQB24s12s40s115s")
"""index, sequence, begun, ended, group, peer, bytes, state, operation, dtype, label, place"""
ENDED, ENDED_AT = struct.Struct("<d"), 24
"""When an entry's call ended, and where that stands in the entry."""
STATE_AT = 48
RUNNING, FINISHED, FAILED = 1, 2, 3


class CallLog(Protocol):
    """The last calls of a process, each an entry.

    Attributes:
        waited: Seconds that the thread which made this spent between `enter` and `leave` so far.
        on_wait: Called with True where that thread enters, and with False where it leaves.
    """

    on_wait: Callable[[bool], None] | None

    @property
    def waited(self) -> float:
        """See the class."""

    def kind(self, group: int, op: str, peer: int, dtype: str, label: str, /) -> Kind:
        """What notes that calls begin which have all of this in common."""

    def begin(
        self,
        group: int,
        op: str,
        peer: int,
        nbytes: int,
        dtype: str,
        label: str,
        frame: FrameType,
        /,
    ) -> int:
        """Note that a call begins; see `FlightRecord.begin`. Calls of a group are numbered, those
        with one peer by themselves, so that ranks can be compared."""

    def runner(self) -> Runner:
        """What runs calls that were begun."""

    def finish(self, index: int, failed: bool, /) -> None:
        """Note that the call of this number has ended, unless it has ended before or its place is
        that of a later call."""

    def finish_later(self, index: int, is_done: Callable[[], bool], /) -> None:
        """A call that goes on beside the program: it has ended when `is_done()` is true, which is
        asked at later calls and by whoever asks for `oldest`."""

    def oldest(self) -> float | None:
        """When the oldest call that has not ended began, by time.monotonic."""

    def enter(self) -> float:
        """This thread begins to wait in a call that is noted: when, by time.monotonic; less than 0
        where its time does not count as waited."""

    def leave(self, begun: float, /) -> None:
        """This thread waits no longer; `begun` is what `enter` returned."""

    def inside(self) -> bool:
        """Whether this thread is within a call that is already noted."""

    def shift(self, by: int, /) -> None:
        """This thread is within so many more calls that need not be noted."""


class _Inside(threading.local):
    depth = 0  # how many calls that are noted, or need not be, this thread is within


_inside = _Inside()


class PythonCallLog:
    """A `CallLog` without kernels.

    Args:
        memory: Of the file.
        header: Bytes before the first entry.
        entries: How many calls are kept.
    """

    def __init__(self, memory: mmap.mmap, header: int, entries: int) -> None:
        self._memory, self._header, self._entries, self._index = memory, header, entries, 0
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, str, int], int] = {}
        self._places: dict[tuple[int, int], tuple[CodeType, bytes]] = {}
        self._begun: dict[int, float] = {}
        self._later: deque[tuple[int, Callable[[], bool]]] = deque()
        self._clock = time.time() - time.monotonic()
        self._thread = threading.get_ident()
        self.waited = 0.0
        self.on_wait: Callable[[bool], None] | None = None

    def kind(self, group: int, op: str, peer: int, dtype: str, label: str, /) -> Kind:
        """See `CallLog`."""

        def begin(nbytes: int, /) -> int:
            if self.inside():
                return 0
            return self.begin(group, op, peer, nbytes, dtype, label, sys._getframe(1))

        return begin

    def begin(
        self,
        group: int,
        op: str,
        peer: int,
        nbytes: int,
        dtype: str,
        label: str,
        frame: FrameType,
        /,
    ) -> int:
        """See `CallLog`."""
        self._look()
        now = time.monotonic()
        place = self._place(frame)
        with self._lock:
            key = (group, op if peer >= 0 else "", peer)
            sequence = self._counts[key] = self._counts.get(key, 0) + 1
            self._index += 1
            index = self._index
            self._begun[index] = now
        texts = op.encode()[:24], dtype.encode()[:12], label.encode()[:40], place
        ENTRY.pack_into(
            self._memory,
            self._offset(index),
            *(index, sequence, now + self._clock, 0.0, group, peer, nbytes, RUNNING, *texts),
        )
        return index

    def runner(self) -> Runner:
        """See `CallLog`."""
        return self._run

    def _run(self, index: int, body: Callable[[], Any], /) -> Any:
        begun, failed = self.enter(), True
        try:
            found = body()
            failed = False
        finally:
            if index:
                self.finish(index, failed)
            self.leave(begun)
        return found

    def finish(self, index: int, failed: bool, /) -> None:
        """See `CallLog`."""
        now = time.monotonic()
        with self._lock:
            begun = self._begun.pop(index, None)
            if begun is None or self._index - index >= self._entries:
                return
        offset = self._offset(index)
        ENDED.pack_into(self._memory, offset + ENDED_AT, now + self._clock)
        self._memory[offset + STATE_AT] = FAILED if failed else FINISHED

    def finish_later(self, index: int, is_done: Callable[[], bool], /) -> None:
        """See `CallLog`."""
        with self._lock:
            self._later.append((index, is_done))

    def oldest(self) -> float | None:
        """See `CallLog`."""
        self._look()
        with self._lock:
            return min(self._begun.values(), default=None)

    def enter(self) -> float:
        """See `CallLog`."""
        if threading.get_ident() != self._thread:
            _inside.depth += 1
            return -1.0
        if self.on_wait is not None:
            self.on_wait(True)
        _inside.depth += 1
        return time.monotonic()

    def leave(self, begun: float, /) -> None:
        """See `CallLog`."""
        _inside.depth -= 1
        if begun >= 0.0:
            self.waited += time.monotonic() - begun
            if self.on_wait is not None:
                self.on_wait(False)

    def inside(self) -> bool:
        """See `CallLog`."""
        return _inside.depth > 0

    def shift(self, by: int, /) -> None:
        """See `CallLog`."""
        _inside.depth += by

    def _look(self) -> None:
        """Note the ends of calls that went on beside the program."""
        if not self._later:
            return
        with self._lock:
            waiting, self._later = self._later, deque()
        for index, is_done in waiting:
            if is_done():
                self.finish(index, False)
            else:
                self.finish_later(index, is_done)

    def _offset(self, index: int) -> int:
        return self._header + (index - 1) % self._entries * ENTRY.size

    def _place(self, frame: FrameType) -> bytes:
        found = user_frame(frame)
        if found is None:
            return b"?"
        # The hash of code is that of all its names and constants, and a line number is looked for
        # in a table: neither is needed to know a place again.
        code, key = found.f_code, (id(found.f_code), found.f_lasti)
        if (known := self._places.get(key)) is None:
            known = self._places[key] = code, described(found)
        return known[1]


def call_log(memory: mmap.mmap, header: int, entries: int) -> CallLog:
    """A log in this memory, by the kernels where there are any.

    Args:
        memory: Of the file.
        header: Bytes before the first entry.
        entries: How many calls are kept.
    """
    module = native()
    if module is None:
        return PythonCallLog(memory, header, entries)
    log: CallLog = module.CallLog(memory, header, entries, whose, described)
    return log
