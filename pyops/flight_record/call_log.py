"""The calls of a flight record, in the memory of its file: the class that pyops/_native has in C++
(csrc/native/call_log.cpp), in Python for an installation without kernels.

memory    | header | entry 1 | entry 2 | ... | entry n |      call n + 1 takes the place of call 1
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from types import CodeType, FrameType
from typing import Protocol

from pyops.flight_record.frames import described, user_frame, whose
from pyops.ops.library import native

__all__ = ["ENTRY", "FAILED", "FINISHED", "RUNNING", "CallLog", "PythonCallLog", "call_log"]

ENTRY = struct.Struct("<QQddIiQB24s12s40s115s")
"""index, sequence, begun, ended, group, peer, bytes, state, operation, dtype, label, place"""
ENDED, ENDED_AT = struct.Struct("<d"), 24
"""When an entry's call ended, and where that stands in the entry."""
STATE_AT = 48
RUNNING, FINISHED, FAILED = 1, 2, 3


class CallLog(Protocol):
    """The last calls of a process, each an entry."""

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

    def finish(self, index: int, failed: bool, /) -> None:
        """Note that the call of this number has ended, unless it has ended before or its place is
        that of a later call."""

    def oldest(self) -> float | None:
        """When the oldest call that has not ended began, by time.monotonic."""


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
        self._clock = time.time() - time.monotonic()

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

    def oldest(self) -> float | None:
        """See `CallLog`."""
        with self._lock:
            return min(self._begun.values(), default=None)

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
