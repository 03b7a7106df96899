"""Leases of samples: each is handed out, once where nobody is late."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pyops.parameter_server import Leases

pytestmark = pytest.mark.cpu_only


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def leases(store: dist.Store, worker: int, clock: Time, **options: int) -> Leases:
    return Leases(store, samples=23, batch=5, worker=worker, seconds=10.0, clock=clock, **options)


def test_each_sample_is_handed_out_once_where_nobody_is_late():
    store, clock = dist.HashStore(), Time()
    ways = [iter(leases(store, worker, clock)) for worker in range(3)]
    seen: list[int] = []
    for turn in range(5):
        seen += next(ways[turn % 3]).tolist()
    assert sorted(seen) == list(range(23))
    first = leases(store, 7, clock)
    assert first.take() is None
    assert not first.over()
    assert first.again == 0
    assert sorted(x for s in leases(store, 0, clock, epoch=1) for x in s.tolist()) == seen


def test_what_a_lost_worker_held_is_handed_out_again_after_its_time():
    store, clock = dist.HashStore(), Time()
    lost, other = leases(store, 0, clock), leases(store, 1, clock)
    assert lost.take() == 0
    taken = [other.take() for _ in range(4)]
    assert taken == [1, 2, 3, 4]
    for lease in taken:
        other.finish(lease)
    clock.now = 9.9
    assert other.take() is None
    assert not other.over()
    clock.now = 10.1
    third = leases(store, 2, clock)
    assert other.take() == 0
    assert third.take() is None  # not twice
    assert other.again == 1
    other.finish(0)
    assert third.over()
    assert other.over()


def test_a_number_that_was_taken_by_a_process_that_died_at_once_is_handed_out():
    store, clock = dist.HashStore(), Time()
    one = leases(store, 0, clock)
    one._store.add("next", 1)  # and nothing more: lease 0 has no holder
    seen = sorted(x for samples in one for x in samples.tolist())
    assert seen == list(range(23))


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"batch": 0}, {"worker": -1}, {"seconds": 0.0}])
def test_numbers_below_their_least_are_refused(wrong: dict[str, float]):
    given = {"samples": 4, "batch": 2, "worker": 0, "seconds": 1.0} | wrong
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; give"):
        Leases(dist.HashStore(), **given)  # type: ignore[arg-type]
