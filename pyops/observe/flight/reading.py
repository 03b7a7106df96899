"""What the flight records of a folder say, rank by rank.

    rank0.flight  rank0.groups  rank0.stacks   ->   RankRecord(entries, state, last seen, stacks)
    rank1.flight  ...

The files may be of processes that still run, that ended, or that were killed.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyops.flight_record import ENTRY, HEADER_BYTES, LIFE, LIFE_AT, RUNNING

__all__ = ["Entry", "FlightError", "Group", "RankRecord", "read_records"]


class FlightError(ValueError):
    """A folder or a file that holds no flight record."""


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    """The same on all of its ranks."""
    ranks: tuple[int, ...]
    """Counted among all."""

    def __str__(self) -> str:
        if len(self.ranks) > 8:
            return f"group {self.name} of {len(self.ranks)} ranks"
        return f"group {self.name} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(frozen=True)
class Entry:
    """One call of one rank."""

    index: int
    """Its number among all calls of the rank, from 1 on."""
    sequence: int
    """Its number among the collectives of its group, or the messages of its kind with its peer."""
    begun: float
    """Seconds, by the clock of the rank's host."""
    ended: float
    """0 where it has not."""
    group: Group
    peer: int
    """The other rank of a message; -1: a collective."""
    nbytes: int
    """0 where ranks may differ."""
    state: int
    """RUNNING, FINISHED or FAILED."""
    op: str
    """The operation: "all_reduce"."""
    dtype: str
    """"" where ranks may differ."""
    label: str
    """What the call was for: the bucket."""
    place: str
    """The line of the user's program."""

    @property
    def waits(self) -> bool:
        """Whether the call has not ended."""
        return self.state == RUNNING

    @property
    def name(self) -> str:
        """The call in words: "all_reduce #41 (4096 bytes of float32) for bucket 3"."""
        size = f" ({self.nbytes:,} bytes of {self.dtype})" if self.dtype else ""
        to = f" with rank {self.peer}" if self.peer >= 0 else ""
        label = f" {self.label}" if self.label else ""
        return f"{self.op} #{self.sequence}{label}{size}{to}"


@dataclass(frozen=True)
class RankRecord:
    """What one rank left."""

    rank: int
    """Whose record it is."""
    size: int
    """How many ranks there are."""
    host: str
    """Its name."""
    pid: int
    """The number of the process there."""
    life: int
    """RUNNING, FINISHED or FAILED, as the process itself said last."""
    seen: float
    """When it was last seen alive; seconds, by the clock of its host."""
    exists: bool | None
    """Whether its process is there; None where that can't be told from this host."""
    entries: tuple[Entry, ...]
    """Oldest first; messages and collectives."""
    stacks: dict[str, list[str]] = field(default_factory=dict)
    """{thread: lines, innermost last}, where they were written."""

    @property
    def stack(self) -> str:
        """The line at which the program stands, "" where it is not known."""
        lines = self.stacks.get("MainThread") or []
        return lines[-1] if lines else ""

    @property
    def is_dead(self) -> bool:
        """Whether the process is gone and did not say that it ends."""
        return self.life == RUNNING and self.exists is False


def read_records(folder: str | Path) -> dict[int, RankRecord]:
    """The records in a folder, by rank.

    Args:
        folder: With rank0.flight and so on, or one that has such a folder, "flight", within.

    Raises:
        FlightError: There are none, or a file is not whole.
    """
    where = Path(folder)
    if (where / "flight").is_dir():
        where = where / "flight"
    paths = sorted(where.glob("rank*.flight"))
    if not paths:
        raise FlightError(
            f"{folder} has no rank*.flight; give the folder of a run of two or more ranks, with "
            "train.flight_record true, or the one given to pyops.flight_record.recording"
        )
    found = [_read(path) for path in paths]
    return {record.rank: record for record in found}


def _read(path: Path) -> RankRecord:
    data = path.read_bytes()
    try:
        header: dict[str, Any] = json.loads(data[:LIFE_AT].rstrip(b"\0"))
        life, seen = LIFE.unpack_from(data, LIFE_AT)
        entries_at = [HEADER_BYTES + i * ENTRY.size for i in range(header["entries"])]
        raw = [ENTRY.unpack_from(data, at) for at in entries_at]
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise FlightError(f"{path} is no flight record, or cut off: {error}") from None
    except Exception as error:  # struct.error has no base class of its own
        raise FlightError(f"{path} is no flight record, or cut off: {error}") from None
    groups = _groups(path.with_suffix(".groups"))
    entries = [_entry(values, groups) for values in raw if values[0]]
    last = max((max(e.begun, e.ended) for e in entries), default=0.0)
    return RankRecord(
        rank=header["rank"],
        size=header["size"],
        host=header["host"],
        pid=header["pid"],
        life=life,
        seen=max(seen, last),
        exists=_exists(header["host"], header["pid"]),
        entries=tuple(sorted(entries, key=lambda e: e.index)),
        stacks=_stacks(path.with_suffix(".stacks")),
    )


def _entry(values: tuple[Any, ...], groups: list[Group]) -> Entry:
    index, sequence, begun, ended, group, peer, nbytes, state, *texts = values
    op, dtype, label, place = (t.rstrip(b"\0").decode(errors="replace") for t in texts)
    known = groups[group] if group < len(groups) else Group("?", ())
    return Entry(index, sequence, begun, ended, known, peer, nbytes, state, op, dtype, label, place)


def _groups(path: Path) -> list[Group]:
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return [Group(row["name"], tuple(row["ranks"])) for row in rows]
    except (OSError, ValueError):
        return []


def _stacks(path: Path) -> dict[str, list[str]]:
    try:
        found: dict[str, list[str]] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _exists(host: str, pid: int) -> bool | None:
    if host != socket.gethostname():
        return None
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except OSError:
        return None
