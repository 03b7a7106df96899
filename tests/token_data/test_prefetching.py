"""What is made ahead changes no batch and no cursor; iterables of the user's go on where they
were."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

from pyops.data import CorpusError
from pyops.token_data import Prefetched, RankStates, UserBatches

pytestmark = pytest.mark.cpu_only


class Counting:
    """Batches that are numbers."""

    def __init__(self, *, seconds: float = 0.0, broken: int = -1) -> None:
        self.number, self.seconds, self.broken = 0, seconds, broken

    def next(self) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        if self.number == self.broken:
            raise OSError("the disk is gone")
        self.number += 1
        return {"tokens_BT": torch.tensor([[self.number - 1]])}

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def test_the_cursor_is_of_what_was_taken_and_not_of_what_was_made():
    inner = Counting()
    batches = Prefetched(inner, depth=3)
    assert int(batches.next()["tokens_BT"]) == 0
    for _ in range(200):
        if inner.number == 5:  # three in the queue, and one more in the thread
            break
        time.sleep(0.01)
    assert inner.number == 5
    assert batches.state_dict() == {"number": 1}
    batches.close()
    assert inner.number == 1
    assert int(batches.next()["tokens_BT"]) == 1
    batches.close()


def test_what_the_stream_raises_comes_in_the_order_of_its_batches():
    batches = Prefetched(Counting(broken=2), depth=3)
    assert [int(batches.next()["tokens_BT"]) for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        batches.next()
    assert batches.state_dict() == {"number": 2}


def test_the_thread_ends_with_what_reads_of_it():
    before = set(threading.enumerate())
    batches = Prefetched(Counting(), depth=1)
    batches.next()
    (own,) = set(threading.enumerate()) - before
    del batches
    gc.collect()
    assert not own.is_alive()
    with pytest.raises(ValueError, match="depth is -1"):
        Prefetched(Counting(), depth=-1)


class Plain:
    """Rows without a state."""

    def __init__(self, count: int = 4) -> None:
        self.count = count

    def __iter__(self):
        for i in range(self.count):
            yield torch.tensor([[i, i + 1, i + 2]])


class Stateful(Plain):
    """Rows whose order hangs on a state of their own."""

    def __init__(self, count: int = 4) -> None:
        super().__init__(count)
        self.place = 0

    def __iter__(self):
        while self.place < self.count:
            self.place += 1
            yield {
                "tokens_BT": torch.tensor([[self.place - 1]], dtype=torch.int32),
                "targets_BT": torch.tensor([[self.place]]),
            }
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("kind", [Plain, Stateful])
@pytest.mark.parametrize("depth", [0, 2])
def test_an_iterable_goes_on_where_it_was(kind, depth):
    batches = RankStates(Prefetched(UserBatches(kind()), depth=depth), rank=0)
    numbers = [int(batches.next()["tokens_BT"][0, 0]) for _ in range(6)]
    assert numbers == [0, 1, 2, 3, 0, 1]
    state = batches.state_dict()
    again = RankStates(Prefetched(UserBatches(kind()), depth=depth), rank=0)
    again.load_state_dict(state)
    assert [int(again.next()["targets_BT"][0, 0]) for _ in range(4)] == [3, 4, 1, 2]


def test_iterables_that_are_none():
    with pytest.raises(TypeError, match="int, which is no iterable"):
        UserBatches(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="can't be begun again"):
        UserBatches(iter([]))
    half = type("Half", (Plain,), {"state_dict": lambda self: {}})
    with pytest.raises(TypeError, match="has one of state_dict and load_state_dict"):
        UserBatches(half())
    with pytest.raises(CorpusError, match="has no batch"):
        UserBatches([]).next()
    with pytest.raises(CorpusError, match="gave str; a batch is"):
        UserBatches(["text"]).next()
    with pytest.raises(CorpusError, match="no tensor of whole numbers"):
        UserBatches([torch.zeros(2, 3)]).next()
    state = UserBatches(Plain()).state_dict()
    with pytest.raises(CorpusError, match="state of the data is not one of"):
        UserBatches(Stateful()).load_state_dict(state)
    with pytest.raises(CorpusError, match=r"ended after 2 batches.*had taken 3"):
        UserBatches(Plain(2)).load_state_dict({"epoch": 0, "given": 3, "own": None})


def test_states_of_other_ranks():
    state = {"ranks": [UserBatches(Plain()).state_dict(), {"epoch": 0, "given": 2, "own": None}]}
    with pytest.raises(CorpusError, match="by 2 ranks, each at a place of its own"):
        RankStates(UserBatches(Plain()), rank=0).load_state_dict(state)
    same = {"ranks": [{"epoch": 0, "given": 2, "own": None}] * 2}
    batches = RankStates(UserBatches(Plain()), rank=0)
    batches.load_state_dict(same)
    assert int(batches.next()["tokens_BT"][0, 0]) == 2
