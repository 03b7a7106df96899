"""Sandblaster over a store and sessions, in threads and in processes that die."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.failure import CommunicationError
from pyops.sandblaster import (
    Coordinator,
    SandblasterConfig,
    StoreCluster,
    VirtualCluster,
    VirtualPace,
    hold,
    work,
)
from tests.sandblaster.problems import flat, network, portion_loss
from tests.workers import fork_server

pytestmark = pytest.mark.cpu_only
CONFIG = SandblasterConfig(portions=6, history_size=4, patience=20.0)


def tcp_store(port: int = 0) -> dist.TCPStore:
    """A store that this process serves; one that another serves, where its port is given."""
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=port == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )


def in_threads(*bodies: Any) -> list[threading.Thread]:
    threads = [threading.Thread(target=body) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def ended(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def expected(iterations: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Of the same run in virtual time."""
    found = VirtualCluster(network(dtype), portion_loss(6, dtype), [VirtualPace()], config=CONFIG)
    leads = Coordinator(found, CONFIG)
    leads.minimize(iterations)
    leads.settle()
    found.parameters()
    return flat(found.gradients.model)


def test_threads_take_the_steps_of_virtual_time_and_one_coordinator_leads():
    store, models = tcp_store(), [network(), network()]
    cluster = StoreCluster(store, shards=2, config=CONFIG)
    with pytest.raises(ValueError, match="another coordinator leads this run; end this one"):
        StoreCluster(store, shards=2, config=CONFIG)
    threads = in_threads(
        lambda: hold(store, shard=0, shards=2),
        lambda: hold(store, shard=1, shards=2),
        lambda: work(store, models[0], portion_loss(6), worker=0, shards=2),
        lambda: work(store, models[1], portion_loss(6), worker=1, shards=2),
    )
    leads = Coordinator(cluster, CONFIG)
    leads.minimize(4)
    leads.settle()
    cluster.stop()
    ended(threads)
    assert torch.equal(flat(models[0]), flat(models[1]))
    torch.testing.assert_close(flat(models[0]), expected(4), rtol=0, atol=1e-10)


def test_a_coordinator_that_replaces_another_goes_on_and_the_older_one_is_refused():
    store, model = tcp_store(), network()
    old = StoreCluster(store, config=CONFIG)
    threads = in_threads(lambda: hold(store), lambda: work(store, model, portion_loss(6)))
    first = Coordinator(old, CONFIG)
    before = first.minimize(3).loss
    new = StoreCluster(store, config=CONFIG, take_over=True)
    leads = Coordinator(new, CONFIG)
    with pytest.raises(CommunicationError, match="coordinator 1: coordinator 2 leads the run"):
        first.iterate()
    assert leads.minimize(4).loss < before
    leads.settle()
    new.stop()
    ended(threads)


def test_what_does_not_go_together_is_refused():
    store = tcp_store()
    short = SandblasterConfig(portions=6, patience=0.3)
    with pytest.raises(CommunicationError, match=r"shard 0 did not answer within 0\.3 seconds"):
        Coordinator(StoreCluster(store, config=short), short)
    with pytest.raises(ValueError, match="shard is 2 of 2"):
        hold(store, shard=2, shards=2)
    with pytest.raises(ValueError, match="shards is 0"):
        StoreCluster(store, shards=0)
    threads = in_threads(lambda: hold(store))
    with pytest.raises(ValueError, match="running statistic"):
        work(store, nn.BatchNorm1d(3), portion_loss(6))
    cluster = StoreCluster(store, config=CONFIG, take_over=True)
    threads += in_threads(lambda: work(store, network(), portion_loss(6)))
    leads = Coordinator(cluster, CONFIG)
    with pytest.raises(ValueError, match="another process holds shard 0"):
        hold(store)
    with pytest.raises(ValueError, match=r"worker 1 and shard 0 differ .* start all with the same"):
        work(store, network(torch.float32), portion_loss(6, torch.float32), worker=1)
    leads.iterate()
    cluster.stop()
    ended(threads)


def slow_loss(model: nn.Module, portion: int) -> torch.Tensor:
    time.sleep(0.02)
    return portion_loss(6)(model, portion)


def worker_process(port: int, worker: int) -> None:
    work(tcp_store(port), network(), slow_loss, worker=worker, shards=2)


@pytest.mark.full  # its cut: the thread below
def test_a_worker_that_is_killed_changes_nothing_for_the_others():
    store, model = tcp_store(), network()
    process = fork_server().Process(target=worker_process, args=(store.port, 1))
    process.start()
    cluster = StoreCluster(store, shards=2, config=CONFIG)
    threads = in_threads(
        lambda: hold(store, shard=0, shards=2),
        lambda: hold(store, shard=1, shards=2),
        lambda: work(store, model, slow_loss, worker=0, shards=2),
    )
    leads = Coordinator(cluster, CONFIG)
    store.wait(["pyops/sandblaster/joined/1"], timedelta(seconds=60))
    killing = threading.Timer(0.05, os.kill, (process.pid, signal.SIGKILL))
    killing.start()  # within the first evaluation, which takes both workers 0.06 s at least
    for _ in range(6):
        leads.iterate()
    killing.join()
    leads.settle()
    cluster.stop()
    ended(threads)
    process.join(10)
    torch.testing.assert_close(flat(model), expected(6), rtol=0, atol=1e-10)


def test_a_worker_that_fails_within_a_portion_changes_nothing_for_the_others():
    store, model, began = tcp_store(), network(), threading.Event()

    def fails(model: nn.Module, portion: int) -> torch.Tensor:
        began.set()
        raise KeyError(portion)

    def lost() -> None:
        with pytest.raises(KeyError):
            work(store, network(), fails, worker=1)

    def waits(model: nn.Module, portion: int) -> torch.Tensor:
        assert began.wait(20)
        return portion_loss(6)(model, portion)

    cluster = StoreCluster(store, config=CONFIG)
    threads = in_threads(lambda: hold(store), lost, lambda: work(store, model, waits))
    leads = Coordinator(cluster, CONFIG)
    leads.minimize(3)
    leads.settle()
    cluster.stop()
    ended(threads)
    torch.testing.assert_close(flat(model), expected(3), rtol=0, atol=1e-10)
