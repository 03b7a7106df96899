"""The file of one rank: its format, and the record that writes it.

rank3.flight  [header | entry | entry | ... ]    memory-mapped: a killed process leaves it
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from pyops.flight_record.call_log import ENTRY, FAILED, FINISHED, RUNNING, Kind, call_log

__all__ = [
    "ENTRIES",
    "ENTRY",
    "FAILED",
    "FINISHED",
    "HEADER_BYTES",
    "LIFE",
    "LIFE_AT",
    "RUNNING",
    "FlightRecord",
]

HEADER_BYTES = 4096
LIFE = struct.Struct("<Bd")
"""How the process stands (RUNNING, FINISHED, FAILED), and when it was last seen alive."""
LIFE_AT = HEADER_BYTES - LIFE.size
VERSION = 1
ENTRIES = 2048


class FlightRecord:
    """The record of one rank: `folder`/rankR.flight.

    Args:
        folder: Of the run; made where it is not there. All ranks write to it, on a disk that they
            share where one reader is to see them all.
        rank: Of this process.
        size: How many ranks there are.
        entries: How many calls are kept: the last ones.

    Attributes:
        log: What its entries are noted in.
        run: Runs a call that was begun: the runner of `log`.
        waited: Seconds that the thread which made this spent within collectives so far.
        on_wait: Called with True where that thread begins to wait, and with False where it ends.
        oldest: When the oldest call that has not ended began, by time.monotonic; None: there is
            none.

    Raises:
        ValueError: `rank` is not below `size`, or `entries` is less than 1.
    """

    def __init__(self, folder: str | Path, *, rank: int, size: int, entries: int = ENTRIES) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}; give one of 0 to {size - 1}")
        if entries < 1:
            raise ValueError(f"entries is {entries}; give 1 or more")
        self.folder, self.rank, self.size = Path(folder), rank, size
        self.path = self.folder / f"rank{rank}.flight"
        self._lock = threading.Lock()
        self._groups: dict[str, int] = {}
        self.folder.mkdir(parents=True, exist_ok=True)
        length = HEADER_BYTES + entries * ENTRY.size
        with open(self.path, "w+b") as file:
            file.truncate(length)
            self._map = mmap.mmap(file.fileno(), length)
        self.log = call_log(self._map, HEADER_BYTES, entries)
        self.run = self.log.runner()
        header = {
            "version": VERSION,
            "entries": entries,
            "rank": rank,
            "size": size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "program": sys.argv[0] if sys.argv else "",
            "started": time.time(),
        }
        text = json.dumps(header).encode()[: LIFE_AT - 1]
        self._map[: len(text)] = text
        self._groups_path = self.folder / f"rank{rank}.groups"
        self._groups_path.write_text("")
        self.alive()

    @property
    def oldest(self) -> float | None:
        """See the class."""
        return self.log.oldest()

    @property
    def waited(self) -> float:
        """See the class."""
        return self.log.waited

    @property
    def on_wait(self) -> Callable[[bool], None] | None:
        """See the class."""
        return self.log.on_wait

    @on_wait.setter
    def on_wait(self, call: Callable[[bool], None] | None) -> None:
        self.log.on_wait = call

    def alive(self) -> None:
        """Note that the process lives."""
        LIFE.pack_into(self._map, LIFE_AT, RUNNING, time.time())

    def begin(
        self,
        op: str,
        *,
        group: tuple[str, Sequence[int]],
        nbytes: int = 0,
        dtype: str = "",
        peer: int = -1,
        label: str = "",
        frame: FrameType | None = None,
    ) -> int:
        """Note that a call begins.

        Args:
            op: The operation: "all_reduce".
            group: The group's name, the same on its ranks, and its ranks.
            nbytes: Of the tensor that all ranks give alike; 0 where ranks may differ.
            dtype: Of it; "" where ranks may differ.
            peer: The other rank of a message, counted among all; -1: all ranks of the group.
            label: What the call is for: the bucket.
            frame: Of the call; the user's line is looked for from there.

        Returns:
            The number of the call, for `finish`.
        """
        number = self._groups.get(group[0])
        if number is None:
            number = self._new_group(group)
        there = frame or sys._getframe(1)
        return self.log.begin(number, op, peer, nbytes, dtype, label, there)

    def kind(
        self,
        op: str,
        *,
        group: tuple[str, Sequence[int]],
        dtype: str = "",
        peer: int = -1,
        label: str = "",
    ) -> Kind:
        """What notes that calls begin, as `begin` does, for calls that differ in bytes alone: for
        those of every step, which it costs a fraction.

        Args:
            op, group, dtype, peer, label: See `begin`.
        """
        number = self._groups.get(group[0])
        if number is None:
            number = self._new_group(group)
        return self.log.kind(number, op, peer, dtype, label)

    def finish(self, index: int, *, failed: bool = False) -> None:
        """Note that a call has ended.

        Args:
            index: What `begin` returned.
            failed: Whether it raised.
        """
        self.log.finish(index, failed)

    def finish_later(self, index: int, is_done: Callable[[], bool]) -> None:
        """A call that goes on beside the program: it has ended when `is_done()` is true, which is
        asked at later calls and by whoever asks for `oldest`."""
        self.log.finish_later(index, is_done)

    def close(self, *, failed: bool = False) -> None:
        """The program has come to its end.

        Args:
            failed: With an error.
        """
        self.log.oldest()  # asks which calls that go on beside the program have ended
        LIFE.pack_into(self._map, LIFE_AT, FAILED if failed else FINISHED, time.time())
        self._map.flush()

    def flush(self) -> None:
        """Hand the file to the disk, for readers on other hosts."""
        self._map.flush()

    def _new_group(self, group: tuple[str, Sequence[int]]) -> int:
        with self._lock:
            if (known := self._groups.get(group[0])) is not None:
                return known  # another thread's call was the first
            number = self._groups[group[0]] = len(self._groups)
            with open(self._groups_path, "a") as file:
                file.write(json.dumps({"name": group[0], "ranks": list(group[1])}) + "\n")
        return number
