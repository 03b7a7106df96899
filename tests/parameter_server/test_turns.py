"""Turns at a shard's link: in order, a few at a time, and nobody waits for one that is slow or
gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from pyops.parameter_server import DownpourConfig
from pyops.parameter_server.sessions import turns as module
from pyops.parameter_server.sessions.turns import Turns, Width
from tests.parameter_server.replicas import adagrad
from tests.parameter_server.shard_threads import replica, served

pytestmark = pytest.mark.cpu_only

LIMIT = 30.0  # seconds until a test is taken to hang


class Receiver:
    """A thread that takes a turn, and has it until `end` is set."""

    def __init__(self, turns: Turns, error: Exception | None = None) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self._turns, self._error = turns, error
        self._thread = threading.Thread(target=self._run, daemon=True)
        before = len(turns._turns)
        self._thread.start()
        until(lambda: len(turns._turns) > before)

    def _run(self) -> None:
        try:
            with self._turns.turn(1000):
                self.begun.set()
                self.end.wait(LIMIT)
                if self._error is not None:
                    raise self._error
        except ConnectionError:
            pass

    def close(self) -> None:
        self.end.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()


def until(met: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT
    while not met():
        assert time.monotonic() < limit, "it hangs"
        time.sleep(0.001)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def receiver(turns: Turns, stack: ExitStack, error: Exception | None = None) -> Receiver:
    made = Receiver(turns, error)
    stack.callback(made.close)
    return made


def test_one_after_the_other_in_the_order_in_which_they_asked(stack: ExitStack, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN", LIMIT)  # nobody is late
    turns = Turns()
    each = [receiver(turns, stack) for _ in range(4)]
    for place, one in enumerate(each):
        assert one.begun.wait(LIMIT)
        assert [other.begun.is_set() for other in each] == [i <= place for i in range(4)]
        one.close()


def test_as_many_at_a_time_as_the_width(stack: ExitStack, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN", LIMIT)
    turns = Turns()
    turns.width.turns = 2
    first, second, third = (receiver(turns, stack) for _ in range(3))
    assert first.begun.wait(LIMIT)
    assert second.begun.wait(LIMIT)
    assert not third.begun.is_set()
    second.close()
    assert third.begun.wait(LIMIT)


def test_nobody_waits_for_a_turn_that_is_late(stack: ExitStack, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN", 0.0)
    monkeypatch.setattr(module, "GRACE", 0.01)
    turns = Turns()
    slow, other = (receiver(turns, stack) for _ in range(2))
    assert other.begun.wait(LIMIT)
    assert not slow.end.is_set()


def test_a_turn_that_fails_is_over(stack: ExitStack, monkeypatch):
    monkeypatch.setattr(module, "UNKNOWN", LIMIT)
    turns = Turns()
    lost = receiver(turns, stack, ConnectionError("gone"))
    other = receiver(turns, stack)
    lost.close()
    assert other.begun.wait(LIMIT)
    assert turns._ended == 0, "its bytes have not come"


@pytest.mark.parametrize(("shared", "taken"), [(False, 4), (True, 0)])
def test_each_push_that_travels_takes_a_turn(shared: bool, taken: int, monkeypatch):
    sizes = []

    def counted(turns: Turns, nbytes: int):
        sizes.append(nbytes)
        return turn(turns, nbytes)

    turn = Turns.turn
    monkeypatch.setattr(Turns, "turn", counted)
    with served(adagrad(0.05)) as shards:
        config = DownpourConfig(fetch_delay=0)
        client = replica(shards.store, 0, 4, config=config, shared_memory=shared)
    assert sizes == [client.pushes[0].payload_bytes] * taken


def rates(width: Width, rate_of: Callable[[int], float], windows: int) -> list[int]:
    """The widths of so many windows, of which each has the rate of its width."""
    found = []
    for _ in range(windows):
        found.append(width.turns)
        width.measured(rate_of(width.turns))
    return found


def test_where_the_shards_link_is_narrow_it_is_one_at_a_time_but_for_rare_trials():
    found = rates(Width(), lambda turns: 100.0, 200)
    assert set(found) == {1, 2}
    assert 3 <= found.count(2) <= 10


def test_where_the_links_of_replicas_are_narrow_it_is_as_many_as_fill_the_shards():
    found = rates(Width(), lambda turns: min(100.0 * turns, 400.0), 200)
    assert found[0] == 1
    assert found[-100:].count(4) > 90


def test_where_replicas_leave_it_is_fewer_again():
    width = Width()
    rates(width, lambda turns: 100.0 * turns, 20)
    assert width.turns > 4
    found = rates(width, lambda turns: 100.0, 400)
    assert found[-1] <= 2
    assert 1 in found
