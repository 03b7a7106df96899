"""Processes of replicas and shards that are killed at any moment: the others go on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.parameter_server import ConnectConfig, DownpourConfig, ShardConfig, connect
from tests.grids import cut
from tests.parameter_server.replicas import adagrad, gradient, mean_loss, model
from tests.parameter_server.shard_threads import (
    replica,
    replica_process,
    served,
    shard_process,
    steps_of,
    tcp_store,
)
from tests.workers import fork_server

pytestmark = pytest.mark.cpu_only


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Processes of a test that end with it, also where it fails: the interpreter waits for them."""
    processes: list[Any] = []
    yield processes
    for process in processes:
        process.kill()


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert not process.is_alive()


def wait_for(
    process: Any, seconds: float = 60.0, *, progress: Callable[[], object] = lambda: None
) -> None:
    """Until it ends. It hangs where `progress` has been the same for so many seconds: how long the
    whole takes is up to what else the cores compute."""
    seen, since = progress(), time.monotonic()
    while process.is_alive() and time.monotonic() - since < seconds:
        process.join(0.2)
        if (now := progress()) != seen:
            seen, since = now, time.monotonic()
    alive = process.is_alive()
    if alive:
        os.kill(process.pid, signal.SIGUSR2)  # its threads tell on stderr where they stand
        process.join(1)
        process.kill()
    assert not alive, "the process hangs"


@pytest.mark.parametrize("moment", cut([(n,) for n in range(50)], keep=[(3,)]))
def test_replicas_that_are_killed_leave_the_others_their_way(moment: int, started: list[Any]):
    """Each shard has all of a push or nothing, and the rest of the run is not held up."""
    context, drawn = fork_server(), random.Random(moment)
    config = ShardConfig(max_staleness=4, record=True)
    with served(adagrad(0.02), shards=2, config=config) as shards:
        port = shards.store.port
        killed = [
            context.Process(target=replica_process, args=(port, w, 100_000, 2, 0.0)) for w in (1, 2)
        ]
        for process in killed:
            process.start()
            started.append(process)
        # One that is killed before it is a member of both shards is no loss to them.
        shards.store.wait(["connected/1", "connected/2"], timedelta(seconds=60))
        steps = 60
        client = replica(shards.store, 0, 20, shards=2)
        began = time.monotonic()
        for process in killed:
            time.sleep(drawn.random() * 0.15)
            kill(process)
        client = replica(shards.store, 3, steps, shards=2)
        assert time.monotonic() - began < 30
    for report in shards.reports.values():
        pushes = [entry for entry in report.log if entry[0] == "push"]
        assert len(set(pushes)) == len(pushes) == report.version  # each once, whole
        for worker in (1, 2):
            sequences = [s for _, w, s in pushes if w == worker]
            assert sequences == list(range(1, len(sequences) + 1))
        assert sum(w == 3 for _, w, _ in pushes) == steps
        assert report.counts.lost_members == 2
    assert mean_loss(client.model) < mean_loss(model())


@pytest.mark.parametrize("moment", cut([(n,) for n in range(10)], keep=[(4,)]))
def test_a_shard_that_is_killed_is_started_again_and_loses_few_pushes(
    moment: int, tmp_path: Path, started: list[Any]
):
    context, drawn = fork_server(), random.Random(moment)
    store, every = tcp_store(), 5
    receive, send = context.Pipe(duplex=False)

    def start() -> Any:
        process = context.Process(
            target=shard_process, args=(store.port, 0, 1, str(tmp_path), every, send)
        )
        process.start()
        started.append(process)
        return process

    shard = start()
    worker = context.Process(target=replica_process, args=(store.port, 1, 80, 1, 0.002))
    worker.start()
    started.append(worker)
    client = replica(store, 0, 10)
    time.sleep(drawn.random() * 0.2)
    kill(shard)
    state = torch.load(tmp_path / "shard-0.pt", weights_only=True)["state"]
    shard = start()
    client = replica(store, 2, 30, config=DownpourConfig(fetch_delay=0))
    wait_for(worker, progress=lambda: steps_of(store, 1))
    store.set("pyops/parameter_server/stop", "1")
    assert receive.poll(30)
    report = receive.recv()
    wait_for(shard)
    assert report.epoch == 2
    assert report.version >= state["version"] + every
    assert report.counts.lost_pushes <= every
    assert report.counts.applied + report.counts.lost_pushes == 10 + 80 + 30
    assert mean_loss(client.model) < mean_loss(model())


def test_a_shard_that_stands_still_is_replaced(tmp_path: Path, started: list[Any]):
    """Its connections stay open, but nothing comes: a replica goes on with the next one."""
    context, store = fork_server(), tcp_store()
    receive, send = context.Pipe(duplex=False)

    def start() -> Any:
        process = context.Process(
            target=shard_process, args=(store.port, 0, 1, str(tmp_path), 5, send)
        )
        process.start()
        started.append(process)
        return process

    still, module = start(), model()
    client = connect(module, store, worker=0, patience=ConnectConfig(patience=20, beat_every=0.2))

    def take(steps: range) -> None:
        for step in steps:
            gradient(module, 0, step)
            client.step()

    take(range(10))
    os.kill(still.pid, signal.SIGSTOP)
    going = start()
    thread = threading.Thread(target=take, args=(range(10, 30),), daemon=True)
    thread.start()
    thread.join(30)
    waits = thread.is_alive()
    kill(still)
    if waits:
        kill(going)
    assert not waits, "the replica waits for the shard that stands still"
    client.close()
    store.set("pyops/parameter_server/stop", "1")
    assert receive.poll(30)
    report = receive.recv()
    wait_for(going)
    assert report.epoch == 2
    assert report.counts.applied + report.counts.lost_pushes == 30
