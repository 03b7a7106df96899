"""Planted faults, each named from the records of the ranks: kind, rank, line of the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from pyops.flight_record import FAILED, FINISHED, RUNNING
from pyops.observe import RankRecord, explain, findings
from pyops.observe.flight.reading import Entry, Group

pytestmark = pytest.mark.cpu_only

ALL = Group("0", (0, 1, 2))
Call = tuple[str, int, str]  # operation, bytes, line
A: Call = ("all_reduce", 400, "train.py:10 step")
B: Call = ("all_reduce", 800, "train.py:11 step")
C: Call = ("broadcast", 400, "train.py:12 step")


def record(
    rank: int,
    calls: Sequence[Call],
    *,
    waits: bool = False,
    life: int = RUNNING,
    exists: bool = True,
    stack: str = "",
    group: Group = ALL,
    peer: int = -1,
    dtype: str = "float32",
    seconds: float = 0.01,
) -> RankRecord:
    """What a rank leaves that made these calls; with `waits` it is in the last one."""
    entries = [
        Entry(
            i + 1, i + 1, float(i), i + seconds, group, peer, nbytes, FINISHED, op, dtype, "", place
        )
        for i, (op, nbytes, place) in enumerate(calls)
    ]
    if waits:
        entries[-1] = replace(entries[-1], state=RUNNING, ended=0.0)
    stacks = {"MainThread": [stack]} if stack else {}
    return RankRecord(rank, 3, "host", 1, life, 100.0, exists, tuple(entries), stacks)


def only(*records: RankRecord) -> tuple[str, tuple[int, ...], str]:
    (found,) = findings({each.rank: each for each in records})
    return found.kind, found.ranks, found.text


def test_a_rank_that_works_elsewhere_is_named_with_the_line_where_it_stands():
    late = record(2, [A, B], stack="data.py:17 load")
    kind, ranks, text = only(*(record(r, [A, B, C], waits=True) for r in (0, 1)), late)
    assert (kind, ranks) == ("late", (2,))
    assert "ranks 0, 1 wait for rank 2 in broadcast #3" in text
    assert "train.py:12" in text
    assert text.endswith("it stands at data.py:17 load")


def test_a_dead_rank_is_told_from_a_late_one():
    dead = record(2, [A, B], exists=False)
    kind, ranks, text = only(*(record(r, [A, B, C], waits=True) for r in (0, 1)), dead)
    assert (kind, ranks) == ("dead", (2,))
    assert "after all_reduce #2" in text


@pytest.mark.parametrize(("life", "kind"), [(FINISHED, "ended"), (FAILED, "failed")])
def test_a_rank_that_ended_is_named(life: int, kind: str):
    gone = record(1, [A], life=life, exists=False)
    assert only(record(0, [A, B], waits=True), gone, record(2, [A, B], waits=True))[:2] == (
        kind,
        (1,),
    )


def test_a_rank_without_a_record_is_named():
    kind, ranks, text = only(*(record(r, [A], waits=True) for r in (0, 1)))
    assert (kind, ranks) == ("absent", (2,))
    assert "rank 2 left no record" in text


def test_another_size_is_named_with_both_sizes():
    odd = record(1, [A, ("all_reduce", 804, B[2])], waits=True)
    kind, ranks, text = only(record(0, [A, B], waits=True), odd, record(2, [A, B], waits=True))
    assert (kind, ranks) == ("other size", (1,))
    assert "804 bytes against 800" in text


def test_another_dtype_is_named():
    odd = record(1, [A], waits=True, dtype="int32")
    kind, ranks, text = only(record(0, [A], waits=True), odd, record(2, [A], waits=True))
    assert (kind, ranks) == ("other dtype", (1,))
    assert "int32 against float32" in text


def test_another_order_is_named():
    kind, ranks, text = only(record(0, [A, B]), record(1, [B, A]), record(2, [A, B]))
    assert (kind, ranks) == ("other order", (1,))
    assert "the call of train.py:11 step before that of train.py:10" in text


def test_a_call_that_a_rank_left_out_is_named_by_what_usually_follows():
    whole, short = [A, B, C, A, B], [A, B, C, A, C]
    kind, ranks, text = only(
        record(0, whole, waits=True), record(1, whole, waits=True), record(2, short, waits=True)
    )
    assert (kind, ranks) == ("missing call", (2,))
    assert "rank 2 left out the call of train.py:11" in text


def test_a_call_of_its_own_is_named():
    own = ("reduce", 4, "metrics.py:3 log")
    kind, ranks, text = only(
        record(0, [A, B], waits=True), record(1, [A, own], waits=True), record(2, [A, B])
    )
    assert (kind, ranks) == ("other call", (1,))
    assert "metrics.py:3 log" in text


def test_groups_in_crossed_order_are_a_circle():
    first, second = Group("1", (0, 1)), Group("2", (0, 1))
    a = record(0, [A], waits=True, group=first)
    b = record(1, [B], waits=True, group=second)
    kind, ranks, text = only(a, b, record(2, [A]))
    assert (kind, ranks) == ("circle", (0, 1))
    assert "rank 0 waits for rank 1" in text
    assert "rank 1 waits for rank 0" in text


def test_a_receive_without_a_send_is_named():
    receiving = record(0, [("receive", 0, "stage.py:5 forward")], waits=True, peer=1)
    kind, ranks, text = only(receiving, record(1, [A]), record(2, []))
    assert (kind, ranks) == ("late", (1,))
    assert "stage.py:5" in text


def test_the_cause_is_who_waits_for_nobody():
    chain = Group("1", (1, 2))
    first = record(0, [A], waits=True, group=Group("2", (0, 1)))
    second = record(1, [B], waits=True, group=chain)
    kind, ranks, _ = only(first, second, record(2, [], stack="data.py:17 load"))
    assert (kind, ranks) == ("late", (2,))


def test_all_ranks_in_one_call_blame_the_network():
    kind, ranks, _ = only(*(record(r, [A, B], waits=True) for r in range(3)))
    assert (kind, ranks) == ("transport", ())


def test_the_slow_rank_is_the_one_that_waits_least_whatever_its_clock_says():
    first = record(0, [A] * 10, seconds=0.3)
    late_clock = replace(
        first,
        entries=tuple(replace(e, begun=e.begun + 500, ended=e.ended + 500) for e in first.entries),
    )
    others = record(1, [A] * 10, seconds=0.3), record(2, [A] * 10, seconds=0.01)
    kind, found, text = only(late_clock, *others)
    assert (kind, found) == ("slow", (2,))
    assert "10 of 10 calls" in text


def test_ranks_in_step_are_not_blamed():
    quiet = {r: record(r, [A, B, C] * 4) for r in range(3)}
    assert findings(quiet) == []
    assert "nothing is wrong" in explain(quiet)
