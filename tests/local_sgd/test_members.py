"""Replicas that are processes, of which one is killed and another comes."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pyops.local_sgd import LocalSGD, LocalSGDConfig, Members
from pyops.mesh import ALONE
from tests.local_sgd.replicas import adam, model, train, values
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

CONFIG = LocalSGDConfig(every=2, codec="int8")
STEPS = 16


def come_and_go(rank: int, group: object, port: int) -> Any:
    """Rank 1 is killed in step 5, rank 2 comes when that has happened; the others wait for it."""
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    if rank == 2:
        store.wait(["killed"])
    members = Members(store, grace=0.3, timeout=20.0)
    net = model(seed=rank)
    optimizer = adam(net)
    outer = LocalSGD(net, optimizer, CONFIG, group=ALONE)
    members.join(outer)
    begun = values(net)
    sizes = [outer.exchange.size]
    while outer.steps < STEPS:
        train(net, optimizer, rank, outer.steps)
        if rank == 1 and outer.steps == 4:
            store.set("killed", "yes")
            os._exit(9)
        if outer.steps == 10:
            until = time.monotonic() + 20
            while outer.exchange.size == 1 and time.monotonic() < until:
                members.join(outer)
        members.step(outer)
        sizes.append(outer.exchange.size)
    members.leave()
    part = outer.fragments[0][0]
    return part.weights.detach(), sizes, outer.rounds, values(net), begun


def test_the_rest_go_on_when_one_is_killed_and_another_joins_them():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, killed, third = spawn_ranks(3, come_and_go, store.port, timeout=60)
    assert first.error is None, first.error
    assert third.error is None, third.error
    assert killed.exitcode == 9
    weights, sizes, rounds, own, begun = first.result
    assert torch.equal(weights, third.result[0])
    assert all(torch.equal(a, b) for a, b in zip(own, third.result[3], strict=True))
    starts = [values(model(seed=seed)) for seed in (0, 1)]  # of whichever came first
    assert any(all(map(torch.equal, begun, start)) for start in starts)
    assert sizes[0] == sizes[4] == sizes[-1] == 2
    assert rounds == third.result[2] == STEPS // 2


def test_times_and_groups_that_make_no_sense_are_refused():
    store = dist.HashStore()
    with pytest.raises(ValueError, match="a timeout that is longer than the grace"):
        Members(store, grace=2.0, timeout=1.0)
    members = Members(store, grace=0.05, timeout=5.0)
    try:
        net = model()
        outer = LocalSGD(net, adam(net), CONFIG, group=ALONE)
        members.join(outer)
        assert outer.exchange.size == 1
        with pytest.raises(ValueError, match="leave init_process_group out"):
            Members(store)
    finally:
        members.leave()
