"""Sandblaster over threads and over processes that are killed: the bits of one process."""

from __future__ import annotations

import datetime
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from pyops.failure import CommunicationError
from pyops.parameter_server.messages import Kind, Request, Verdict
from pyops.sandblaster import (
    SandblasterConfig,
    VectorShard,
    Worker,
    coordinate,
    serve,
    stop,
    work,
)
from pyops.sandblaster.serving import _Serving
from tests.grids import full
from tests.sandblaster.problem import begin, loss_of, network, parameters_of
from tests.workers import spawn_ranks

pytestmark = pytest.mark.cpu_only

CONFIG = SandblasterConfig(portions=7, portions_per_message=2)
SHARDS, ITERATIONS = 2, 3


def master() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(store: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", store.port, is_master=False)


class Crew:
    """Shards and workers in threads, each with what it returned or raised."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}
        self._threads: list[threading.Thread] = []

    def start(self, name: str, call) -> None:
        def run() -> None:
            try:
                self.found[name] = call()
            except Exception as error:
                self.found[name] = error

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def expected() -> tuple[torch.Tensor, float]:
    coordinator, held, _ = begin(CONFIG, shards=SHARDS)
    loss = coordinator.run(ITERATIONS).loss
    return parameters_of(held), loss


def test_threads_find_what_one_process_finds() -> None:
    store, crew = master(), Crew()
    for shard in range(SHARDS):
        options = {"shard": shard, "shards": SHARDS, "config": CONFIG}
        crew.start(
            f"shard {shard}", lambda options=options: serve(client(store), network(), **options)
        )
    workers = [Worker(network(), loss_of(CONFIG.portions)) for _ in range(2)]
    for n, worker in enumerate(workers):
        crew.start(
            f"worker {n}",
            lambda worker=worker: work(client(store), worker, shards=SHARDS, config=CONFIG),
        )
    coordinator = coordinate(client(store), shards=SHARDS, config=CONFIG)
    report = coordinator.run(ITERATIONS)
    with pytest.raises(ValueError, match="another process coordinates the run of this store"):
        coordinate(client(store), shards=SHARDS, config=CONFIG)
    with pytest.raises(ValueError, match="another process holds shard 1 of this run"):
        serve(client(store), network(), shard=1, shards=SHARDS, config=CONFIG)
    with pytest.raises(ValueError, match="the model of this process differ"):
        work(
            client(store),
            Worker(torch.nn.Linear(99, 9).double(), loss_of(7)),
            shards=SHARDS,
            config=CONFIG,
        )
    with pytest.raises(ValueError, match="the options of this process differ"):
        coordinate(client(store), shards=SHARDS, config=SandblasterConfig(portions=6))
    coordinator.finish()
    stop(store)
    crew.end()
    values, loss = expected()
    assert report.loss == loss
    for n, worker in enumerate(workers):
        assert torch.equal(flat(worker.model), values), crew.found
        assert isinstance(crew.found[f"worker {n}"], int), crew.found
    units = sum(crew.found[f"worker {n}"] for n in range(2))
    assert units >= CONFIG.units * report.evaluations


def _works(rank: int, group: object, port: int, dies_after: int) -> torch.Tensor:
    """A worker; the second one is killed when it has computed so many portions. The first one waits
    for that after as many as one evaluation has, so that the run does not end before."""
    plain, calls = loss_of(CONFIG.portions), iter(range(1_000_000))
    told = dist.TCPStore("127.0.0.1", port, is_master=False)

    def loss(model: torch.nn.Module, portion: int) -> torch.Tensor:
        call = next(calls)
        if rank == 1 and call == dies_after:
            told.set("killed", "1")
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and call == CONFIG.portions:
            told.wait(["killed"], datetime.timedelta(seconds=120))
        return plain(model, portion)

    worker = Worker(network(), loss)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    work(store, worker, shards=SHARDS, config=CONFIG, lease=2.0)
    return flat(worker.model)


@pytest.mark.parametrize("dies_after", [full(0), full(1), 6, full(9), full(12)])
def test_a_killed_worker_changes_no_bit(dies_after: int) -> None:
    store, crew = master(), Crew()
    for shard in range(SHARDS):
        options = {"shard": shard, "shards": SHARDS, "config": CONFIG}
        crew.start(
            f"shard {shard}", lambda options=options: serve(client(store), network(), **options)
        )

    def lead() -> float:
        coordinator = coordinate(client(store), shards=SHARDS, config=CONFIG, lease=2.0)
        report = coordinator.run(ITERATIONS)
        coordinator.finish()
        stop(store)
        return report.loss

    crew.start("coordinator", lead)
    first, second = spawn_ranks(2, _works, store.port, dies_after)
    crew.end()
    values, loss = expected()
    assert crew.found["coordinator"] == loss
    assert first.error is None, first.error
    assert torch.equal(first.result, values)
    assert second.exitcode == -signal.SIGKILL


def test_a_shard_that_does_not_answer_is_named() -> None:
    store = master()
    coordinator = coordinate(client(store), shards=1, config=CONFIG, patience=0.3)
    with pytest.raises(CommunicationError, match="shard 0 of 1 has not answered 'newest'"):
        coordinator.run(1)
    with pytest.raises(ValueError, match="lease is 0"):
        coordinate(client(store), shards=1, config=CONFIG, lease=0)


def test_a_run_without_workers_says_so() -> None:
    store, crew = master(), Crew()
    options = {"shard": 0, "shards": 1, "config": CONFIG}
    crew.start("shard", lambda: serve(client(store), network(), **options))
    # Enough for the shard's thread to answer beside the load of other tests.
    coordinator = coordinate(client(store), shards=1, config=CONFIG, patience=3.0)
    with pytest.raises(CommunicationError, match=r"no worker has come for 3 s"):
        coordinator.run(1)
    stop(store)
    crew.end()


def test_a_shard_adds_a_unit_once_and_of_its_own_evaluation() -> None:
    held = VectorShard(torch.zeros(3), history_size=2, leaves=2)
    serving = _Serving(held, 0, SandblasterConfig(portions=2))
    serving._evaluation = 4
    gradient = torch.ones(3)

    def push(evaluation: int, unit: int) -> Verdict:
        request = Request(Kind.PUSH, 0, 0, epoch=evaluation, sequence=unit)
        return serving._add(request, gradient.clone())

    assert push(4, 1) == Verdict.APPLIED
    assert push(4, 1) == Verdict.REPEATED
    assert push(3, 0) == Verdict.TOO_STALE
    assert push(4, 0) == Verdict.APPLIED
    assert held.end_evaluation(1.0, ()).total == 6.0
