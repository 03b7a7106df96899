"""Who waits for whom, and why: the flight records of all ranks, compared.

    rank 0   ... #40 #41 #42 all_reduce (waits)
    rank 1   ... #40 #41 #42 all_reduce (waits)      ->  ranks 0, 1 wait for rank 2, which stands
    rank 2   ... #40 #41     (in no collective)          in data.py:17 load

1. The calls of a group are compared by their number: the first that differs is the cause.
2. Else a rank that has not come to a call in which others wait is waited for. A rank that is waited
   for and waits for no other is the cause, and a circle of waiting ranks is a cause of its own.
3. Where no rank waits, the rank that comes last to most calls is the slow one.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pyops.flight_record import FAILED, FINISHED
from pyops.observe.flight.reading import Entry, Group, RankRecord

__all__ = ["Finding", "explain", "findings"]

LEAST_CALLS = 8  # of a group, before a rank is called slow
SLOW_SHARE = 0.1  # of the time, that others wait for it
SAME_TIME = 1.0  # seconds: signs of life that are less apart tell nothing
Calls = Mapping[int, Mapping[int, Entry]]  # {rank: {sequence: entry}}


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong."""

    kind: str
    """"absent", "dead", "failed", "ended", "missing call", "other order", "other call",
    "other size", "other dtype", "late", "circle", "slow", "transport"."""
    ranks: tuple[int, ...]
    """To blame, where one can be blamed."""
    text: str
    """In a sentence."""


def explain(records: Mapping[int, RankRecord]) -> str:
    """What the records say, in lines for a person.

    Args:
        records: By rank, as `read_records` gives them.
    """
    found = findings(records)
    size = max(record.size for record in records.values())
    lines = [f"{len(records)} of {size} ranks left a record"]
    for record in records.values():
        waiting = [entry for entry in record.entries if entry.waits]
        state = {FINISHED: ", ended", FAILED: ", ended with an error"}.get(record.life, "")
        state = ", dead" if record.is_dead else state
        last = waiting[0] if waiting else record.entries[-1] if record.entries else None
        doing = "no call" if last is None else f"{'in' if waiting else 'after'} {last.name}"
        at = "" if last is None else f" at {last.place}"
        lines.append(f"rank {record.rank} on {record.host}{state}: {doing}{at}")
        if not waiting and record.stack and not state:
            lines.append(f"    stands at {record.stack}")
    lines.append("")
    lines += [f"{finding.kind}: {finding.text}" for finding in found]
    if not found:
        lines.append("nothing is wrong: no rank waits, and none comes last to most calls")
    return "\n".join(lines)


def findings(records: Mapping[int, RankRecord]) -> list[Finding]:
    """What went wrong, the cause first.

    Args:
        records: By rank, as `read_records` gives them.
    """
    size = max(record.size for record in records.values())
    found = [
        Finding(
            "absent",
            (rank,),
            f"rank {rank} left no record: it did not come so far, or writes to another folder",
        )
        for rank in range(size)
        if rank not in records
    ]
    differing: list[Finding] = []
    waits: dict[int, dict[int, Entry]] = defaultdict(dict)  # {who: {for whom: in which call}}
    all_in: list[Finding] = []
    for group, calls in _by_group(records).items():
        difference = _difference(group, calls)
        if difference is not None:
            differing.append(difference)
            continue
        all_in += _waiting(group, calls, waits)
    for record in records.values():
        for entry in record.entries:
            if entry.waits and entry.peer >= 0:
                waits[record.rank].setdefault(entry.peer, entry)
    found += differing or [each for each in _causes(records, waits) if each.kind != "absent"]
    if not found and all_in:
        found = all_in
    return found or _slow(records)


def _by_group(records: Mapping[int, RankRecord]) -> dict[Group, dict[int, dict[int, Entry]]]:
    found: dict[Group, dict[int, dict[int, Entry]]] = {}
    for record in records.values():
        for entry in record.entries:
            if entry.peer < 0:
                ranks = found.setdefault(entry.group, {r: {} for r in entry.group.ranks})
                ranks.setdefault(record.rank, {})[entry.sequence] = entry
    return found


def _signature(entry: Entry) -> tuple[str, int, str]:
    return entry.op, entry.nbytes, entry.dtype


def _difference(group: Group, calls: Calls) -> Finding | None:
    """The first call of a group that not all ranks made alike."""
    numbers = sorted({number for entries in calls.values() for number in entries})
    for number in numbers:
        here = {rank: entries[number] for rank, entries in calls.items() if number in entries}
        counts = Counter(map(_signature, here.values()))
        if len(counts) < 2:
            continue
        usual = max(counts, key=lambda s: (counts[s], -min(_who(here, s))))
        odd = tuple(rank for rank, entry in here.items() if _signature(entry) != usual)
        others = [rank for rank in here if rank not in odd]
        theirs, own = here[others[0]], here[odd[0]]
        kind, why = _kind(calls, number, odd[0], others[0])
        return Finding(
            kind,
            odd,
            f"in {group}, {_ranks(odd)} called {own.name} at {own.place}, where {_ranks(others)} "
            f"called {theirs.name} at {theirs.place}: {why}",
        )
    return None


def _who(here: Mapping[int, Entry], signature: tuple[str, int, str]) -> Iterable[int]:
    return (rank for rank, entry in here.items() if _signature(entry) == signature)


def _kind(calls: Calls, number: int, odd: int, other: int) -> tuple[str, str]:
    """What kind of difference it is, and in words."""
    mine, theirs = calls[odd], calls[other]
    a, b = mine[number], theirs[number]
    if a.op == b.op and a.place == b.place:
        if a.dtype != b.dtype:
            return "other dtype", f"{a.dtype} against {b.dtype}"
        return "other size", f"{a.nbytes:,} bytes against {b.nbytes:,}"
    after_mine, after_theirs = mine.get(number + 1), theirs.get(number + 1)
    if (
        after_mine is not None
        and _like(after_mine, b)
        and (after_theirs is None or _like(after_theirs, a))
    ):
        return "other order", f"it made the call of {a.place} before that of {b.place}"
    if after_theirs is not None and _like(after_theirs, a):
        return "missing call", f"rank {odd} left out the call of {b.place}"
    # The calls so far tell which of the two usually follows the other.
    follows = _followers(mine)
    if a.place in follows.get(b.place, ()) or a.place in _followers(theirs).get(b.place, ()):
        return "missing call", f"rank {odd} left out the call of {b.place}"
    if b.place in follows.get(a.place, ()) or b.place in _followers(theirs).get(a.place, ()):
        return "missing call", f"rank {other} left out the call of {a.place}"
    if a.op == b.op and a.nbytes == b.nbytes:
        return "other dtype", f"{a.dtype} against {b.dtype}"
    return "other call", "ranks must make the same calls in the same order"


def _like(a: Entry, b: Entry) -> bool:
    return _signature(a) == _signature(b) and a.place == b.place


def _followers(entries: Mapping[int, Entry]) -> dict[str, set[str]]:
    """{place: places of calls that came right after it}."""
    found: dict[str, set[str]] = defaultdict(set)
    for number, entry in entries.items():
        if number + 1 in entries and not entries[number + 1].waits:
            found[entry.place].add(entries[number + 1].place)
    return found


def _waiting(group: Group, calls: Calls, waits: dict[int, dict[int, Entry]]) -> list[Finding]:
    """Enter who waits for whom within a group; what there is to say where all are there."""
    last = {rank: max(entries, default=0) for rank, entries in calls.items()}
    found = []
    for rank, entries in calls.items():
        for number, entry in entries.items():
            if not entry.waits:
                continue
            late = [other for other in calls if last[other] < number]
            for other in late:
                waits[rank].setdefault(other, entry)
            left = [
                other
                for other in calls
                if (theirs := calls[other].get(number)) is not None and theirs.state == FAILED
            ]
            for other in left:
                waits[rank].setdefault(other, entry)
            if not late and not left and rank == min(calls):
                text = f"all ranks of {group} are in {entry.name} at {entry.place}"
                found.append(
                    Finding("transport", (), f"{text}: the network, or the device, does not answer")
                )
    return found


def _causes(
    records: Mapping[int, RankRecord], waits: Mapping[int, Mapping[int, Entry]]
) -> list[Finding]:
    """The ranks that are waited for and wait for no other; else the circle."""
    wanted = {other for others in waits.values() for other in others}
    found = []
    newest = max((record.seen for record in records.values()), default=0.0)
    for rank in sorted(wanted - set(waits)):
        waiting = [who for who, others in waits.items() if rank in others]
        entry = waits[waiting[0]][rank]
        call = f"{_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''} for rank {rank} in "
        call += f"{entry.name} of {entry.group} at {entry.place}"
        kind, state = _state(records.get(rank), newest)
        found.append(Finding(kind, (rank,), f"{call}; rank {rank} {state}"))
    dead = [f for f in found if f.kind in ("dead", "failed")]
    return dead or found or _circle(waits)


def _state(record: RankRecord | None, newest: float) -> tuple[str, str]:
    if record is None:
        return "absent", "left no record: it did not come so far"
    last = record.entries[-1] if record.entries else None
    after = "before its first call" if last is None else f"after {last.name} at {last.place}"
    if record.life == FINISHED:
        return "ended", f"ended its program {after}"
    if record.life == FAILED or (last is not None and last.state == FAILED):
        return "failed", f"ended with an error {after}"
    behind = newest - record.seen
    if record.is_dead or (record.exists is None and behind > 30 * SAME_TIME):
        return "dead", f"is dead {after}; last seen {behind:.0f} s before the others"
    stands = f"; it stands at {record.stack}" if record.stack else ""
    return "late", f"is in no call, {after}{stands}"


def _circle(waits: Mapping[int, Mapping[int, Entry]]) -> list[Finding]:
    for first in waits:
        path = [first]
        while (after := next(iter(waits.get(path[-1], ())), None)) is not None:
            if after in path:
                ring = path[path.index(after) :]
                steps = [
                    f"rank {a} waits for rank {b} in {waits[a][b].name} of {waits[a][b].group} "
                    f"at {waits[a][b].place}"
                    for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)
                ]
                return [Finding("circle", tuple(sorted(ring)), "; ".join(steps))]
            path.append(after)
    return []


def _slow(records: Mapping[int, RankRecord]) -> list[Finding]:
    """The rank that the others wait for in most calls: it waits least, whatever its clock says."""
    for group, calls in _by_group(records).items():
        held_up, together = Counter[int](), 0
        lost: dict[int, float] = defaultdict(float)
        for number in set.intersection(*(set(entries) for entries in calls.values())):
            here = {rank: entries[number] for rank, entries in calls.items()}
            if len(here) < 2 or any(entry.state != FINISHED for entry in here.values()):
                continue
            spans = {rank: entry.ended - entry.begun for rank, entry in here.items()}
            last = min(spans, key=lambda rank: spans[rank])
            together += 1
            held_up[last] += 1
            lost[last] += statistics.median(s for r, s in spans.items() if r != last) - spans[last]
        if together < LEAST_CALLS:
            continue
        rank, times = held_up.most_common(1)[0]
        own = [entry for entry in records[rank].entries if entry.group == group]
        seconds = max(entry.ended for entry in own) - min(entry.begun for entry in own)
        if times > together / 2 and lost[rank] > SLOW_SHARE * seconds:
            text = (
                f"rank {rank} on {records[rank].host} comes last to {times} of {together} calls of "
                f"{group}: the others waited {lost[rank]:.3g} s of {seconds:.3g} s for it"
            )
            return [Finding("slow", (rank,), text)]
    return []


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
