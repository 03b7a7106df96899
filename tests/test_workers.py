"""The pool of ranks: results in order, errors with their rank, late ranks shown, a new pool after a
failure."""

from __future__ import annotations

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.workers import RankError, spawn_ranks

pytestmark = pytest.mark.cpu_only


def _sum(rank, group, x):
    t = torch.full((3,), float(rank + x))
    dist.all_reduce(t, group=group)
    return t


def _fail_on_1(rank, group):
    if rank == 1:
        raise KeyError("a lost key")


def _sleep_on_0(rank, group):
    if rank == 0:
        time.sleep(60)


def _die_on_1(rank, group):
    if rank == 1:
        os._exit(3)
    return "alive"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_results_in_rank_order(world, n):
    results = world(n).run(_sum, 1)
    assert len(results) == n
    assert all(torch.equal(r, torch.full((3,), n * (n + 1) / 2)) for r in results)


def test_a_rank_that_raises_is_named_and_the_pool_renewed(world):
    before = world(2)
    with pytest.raises(RankError, match=r"(?s)^rank 1: .*KeyError: 'a lost key'"):
        before.run(_fail_on_1)
    assert world(2) is not before
    assert len(world(2).run(_sum, 0)) == 2


@pytest.mark.full
def test_a_late_rank_is_shown_where_it_stands():
    first, second = spawn_ranks(2, _sleep_on_0, timeout=3)
    assert first.error is not None
    assert "_sleep_on_0" in first.error
    assert second.error is None


def test_a_dead_rank_is_reported_with_its_exit_code():
    first, second = spawn_ranks(2, _die_on_1, timeout=20)
    assert first.result == "alive"
    assert second.exitcode == 3


def _objects(rank, group):
    return len(gc.get_objects()), gc.get_freeze_count()


def test_a_rank_begins_with_hardly_an_object_to_collect(monkeypatch, tmp_path):
    """Those of modules are frozen, from whatever folder the first rank is started."""
    monkeypatch.chdir(tmp_path)
    (outcome,) = spawn_ranks(1, _objects, timeout=30)
    to_look_at, frozen = outcome.result
    assert frozen > 100_000
    assert to_look_at < frozen // 10
