"""How replicas see who lives, open the next meeting once, and tell others that they leave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm import CommunicationError
from pyops.healing import HealingDataParallel, Part, Quorum, QuorumConfig, quorum
from tests.healing.living import adam, net, one_process, reached, squares, stores
from tests.workers import spawn_worlds

pytestmark = pytest.mark.cpu_only

LEASE = 5.0
ENDS = 3  # steps of a run
FAILS_AT = 1


class Clock:
    """Time that passes when the test says so."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def alone() -> Iterator[tuple[Quorum, dist.Store]]:
    store = dist.HashStore()
    here = Quorum(store, QuorumConfig(lease=0.2))
    yield here, dist.PrefixStore("pyops/healing", store)
    here.leave()


def test_the_next_meeting_is_opened_once_by_however_many_open_it(
    alone: tuple[Quorum, dist.Store],
) -> None:
    here, store = alone
    store.add("generation", 3)
    here._next(3)
    assert store.add("generation", 0) == 4
    here._next(3)  # another replica that also found meeting 3 to be over
    assert store.add("generation", 0) == 4
    here._next(1)  # one that comes late from a meeting long over
    assert store.add("generation", 0) == 4


def hearts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dist.Store, Clock]:
    """What one replica sees of replicas 1 and 2."""
    store, clock = dist.HashStore(), Clock()
    monkeypatch.setattr(quorum, "time", clock)
    store.add("replicas", 2)
    return quorum._Hearts(store, LEASE), store, clock


def test_a_replica_whose_heart_comes_back_lives_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, store, clock = hearts(monkeypatch)
    store.add("beat/1", 1)
    store.add("beat/2", 1)
    assert seen.alive() == {1, 2}
    clock.now += LEASE + 1
    store.add("beat/1", 1)
    assert seen.alive() == {1}
    clock.now += 1
    assert seen.alive() == {1}
    store.add("beat/2", 1)
    assert seen.alive() == {1, 2}
    clock.now += LEASE + 1
    assert seen.alive() == set()


def test_a_replica_that_has_left_is_not_counted_though_its_heart_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, store, _ = hearts(monkeypatch)
    assert seen.alive() == {1, 2}
    store.set("left/2", "1")
    store.add("beat/2", 1)
    assert seen.alive() == {1}


def run(rank: int, group: object, port: int) -> tuple[list[float], list[str]]:
    """Losses, and the errors after which this replica left the group."""
    dist.destroy_process_group()
    model = net(0)
    # A wait that nobody ends lasts longer than the test.
    config = QuorumConfig(start_replicas=2, lease=3.0, timeout=300.0, meeting_timeout=400.0)
    replica = HealingDataParallel(model, adam(model), reached(port), config=config)
    errors: list[str] = []
    failed = replica._failed

    def noted(error: CommunicationError) -> None:
        errors.append(str(error))
        failed(error)

    replica._failed = noted  # type: ignore[method-assign]

    def compute(module: nn.Module, part: Part) -> tuple[Tensor, int]:
        if part.step == FAILS_AT and rank and not errors:
            raise CommunicationError("came to this rank alone")
        return squares(module, part)

    losses = [replica.step(compute) for _ in range(ENDS)]
    replica.close()
    return losses, errors


@pytest.mark.slow
def test_a_replica_that_leaves_a_step_tells_those_that_wait_for_it_in_shared_memory() -> None:
    expected, _ = one_process()
    (served,) = stores(1)
    (outcomes,) = spawn_worlds(2, run, [(served.port,)], timeout=120)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        losses, errors = outcome.result
        assert losses == pytest.approx(expected[:ENDS], rel=1e-10)
        assert len(errors) == 1
    assert outcomes[1].result[1] == ["came to this rank alone"]
    assert "came to this rank alone" in outcomes[0].result[1][0]


def test_a_replacement_with_the_place_of_a_lost_replica_has_its_rank() -> None:
    store, config = dist.HashStore(), QuorumConfig(lease=0.2)
    replicas = [Quorum(store, config, place=place) for place in (0, 1, 0)]
    assert [each.replica for each in replicas] == [1, 2, 3]
    assert replicas[0]._in_order({2, 3}) == [3, 2]
    unplaced = [Quorum(dist.PrefixStore("other", store), config) for _ in range(2)]
    assert unplaced[0]._in_order({1, 2}) == [1, 2]
    for each in (*replicas, *unplaced):
        each.leave()


def test_a_replica_that_leaves_is_not_waited_for(alone: tuple[Quorum, dist.Store]) -> None:
    here, store = alone
    other = Quorum(here._store, QuorumConfig(lease=0.2))
    assert other.replica == 1  # in a part of the store that is its own
    other.leave()
    assert quorum._Hearts(other._store, LEASE).alive() == set()
    assert quorum._Hearts(store, LEASE).alive() == {here.replica}
