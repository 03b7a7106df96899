"""Shards and coordinators that are killed at any moment: the run ends with the bits of an
undisturbed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.failure import CommunicationError
from pyops.sandblaster import SandblasterConfig, Worker, coordinate, serve, stop, work
from pyops.sandblaster.shard import VectorShard
from tests.grids import cut
from tests.sandblaster.problem import begin, loss_of, network, parameters_of
from tests.sandblaster.test_processes import (
    CONFIG,
    ITERATIONS,
    SHARDS,
    Crew,
    client,
    expected,
    flat,
    master,
)
from tests.workers import fork_server

pytestmark = pytest.mark.cpu_only


def _die_in(operation: str, calls: int) -> None:
    """Kill this process when an operation of its shard is ordered for the so-manieth time, before
    it is done."""
    plain, left = getattr(VectorShard, operation), iter(range(calls - 1))

    def counted(self: VectorShard, *arguments: Any) -> Any:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *arguments)

    setattr(VectorShard, operation, counted)


def shard_process(port: int, shard: int, folder: str, operation: str, calls: int) -> None:
    """A shard that is killed; calls = 0: never."""
    if calls:
        _die_in(operation, calls)
    options = {"shard": shard, "shards": SHARDS, "config": CONFIG, "snapshots": folder}
    serve(torch.distributed.TCPStore("127.0.0.1", port), network(), **options)


def coordinator_process(port: int, operation: str, calls: int) -> None:
    """A coordinator that is killed when it has ordered an operation for the so-manieth time."""
    store = torch.distributed.TCPStore("127.0.0.1", port)
    coordinator = coordinate(store, shards=SHARDS, config=CONFIG)
    plain, left = coordinator.shards.call, iter(range(calls - 1))

    def call(name: str, *arguments: Any) -> list[Any]:
        found = plain(name, *arguments)
        if name == operation and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    coordinator.shards.call = call  # type: ignore[method-assign]
    coordinator.run(ITERATIONS)


class Run:
    """Shards and a worker in threads, with a folder of snapshots."""

    def __init__(self, folder: Path, shards: range) -> None:
        self.store, self.crew, self.folder = master(), Crew(), folder
        for shard in shards:
            self.serve(shard)
        self.worker = Worker(network(), loss_of(CONFIG.portions))
        self.crew.start(
            "worker",
            lambda: work(client(self.store), self.worker, shards=SHARDS, config=CONFIG),
        )

    def serve(self, shard: int) -> None:
        options = {"shard": shard, "shards": SHARDS, "config": CONFIG, "snapshots": self.folder}
        self.crew.start(f"shard {shard}", lambda: serve(client(self.store), network(), **options))

    def process(self, target: Any, *arguments: Any) -> Any:
        process = fork_server().Process(target=target, args=(self.store.port, *arguments))
        process.start()
        return process

    def lead(self, **options: Any) -> float:
        coordinator = coordinate(client(self.store), shards=SHARDS, config=CONFIG, **options)
        report = coordinator.run(ITERATIONS - coordinator.iterations)
        coordinator.finish()
        stop(self.store)
        self.evaluations = report.evaluations
        return report.loss

    def check(self) -> None:
        values, loss = expected()
        assert self.crew.found["leads"] == loss, self.crew.found
        assert torch.equal(flat(self.worker.model), values), self.crew.found
        assert isinstance(self.crew.found["worker"], int)


MOMENTS = [
    ("begin_evaluation", 1),
    ("end_evaluation", 1),
    ("begin_history", 1),
    ("add_gradient", 9),
    ("end_evaluation", 4),
    ("turn", 2),
    ("accept", 2),
    ("state_dict", 2),
    ("add_pair", 2),
]


@pytest.mark.parametrize(("operation", "calls"), cut(MOMENTS, keep=[("add_gradient", 9)]))
def test_a_shard_that_is_killed_and_started_again_changes_no_bit(
    operation: str, calls: int, tmp_path: Path
):
    run = Run(tmp_path, range(1))
    killed = run.process(shard_process, 1, str(tmp_path), operation, calls)
    run.crew.start("leads", run.lead)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    run.serve(1)
    run.crew.end()
    run.check()


@pytest.mark.parametrize(
    ("operation", "calls"),
    cut([*MOMENTS[:3], *MOMENTS[4:7], ("save", 1), ("save", 2)], keep=[("end_evaluation", 4)]),
)
def test_a_coordinator_that_takes_over_changes_no_bit(operation: str, calls: int, tmp_path: Path):
    run = Run(tmp_path, range(SHARDS))
    killed = run.process(coordinator_process, operation, calls)
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    done = len(list(tmp_path.glob("iteration-*")))

    def lead() -> float:
        coordinator = coordinate(client(run.store), shards=SHARDS, config=CONFIG, take_over=True)
        coordinator.run(0)
        assert coordinator.iterations == done
        report = coordinator.run(ITERATIONS - done)
        coordinator.finish()
        stop(run.store)
        return report.loss

    run.crew.start("leads", lead)
    run.crew.end()
    run.check()


def test_a_coordinator_that_was_given_up_ends_with_an_error(tmp_path: Path):
    run = Run(tmp_path, range(SHARDS))
    old = coordinate(client(run.store), shards=SHARDS, config=CONFIG)
    old.run(1)

    def lead() -> float:
        coordinator = coordinate(client(run.store), shards=SHARDS, config=CONFIG, take_over=True)
        coordinator.run(0)
        assert coordinator.iterations == 1
        with pytest.raises(CommunicationError, match="coordinator 2 has taken over the run"):
            old.run(1)
        report = coordinator.run(ITERATIONS - 1)
        coordinator.finish()
        stop(run.store)
        return report.loss

    run.crew.start("leads", lead)
    run.crew.end()
    run.check()


def test_snapshots_of_another_model_and_damaged_ones_are_named(tmp_path: Path):
    run = Run(tmp_path, range(SHARDS))
    run.crew.start("leads", run.lead)
    run.crew.end()
    run.check()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f"iteration-{n}" for n in (ITERATIONS - 1, ITERATIONS)]
    again = Run(tmp_path, range(SHARDS))  # all of them, with another store
    coordinator = coordinate(client(again.store), shards=SHARDS, config=CONFIG)
    coordinator.run(0)
    assert coordinator.iterations == ITERATIONS
    loss = coordinator.run(2).loss
    coordinator.finish()
    stop(again.store)
    again.crew.end()
    whole, held, _ = begin(CONFIG, shards=SHARDS)
    assert whole.run(ITERATIONS + 2).loss == loss
    assert torch.equal(flat(again.worker.model), parameters_of(held))
    options = {"shard": 0, "shards": SHARDS, "snapshots": tmp_path}
    other = torch.nn.Linear(99, 9).double()
    with pytest.raises(ValueError, match=r"iteration-\d is of another model"):
        serve(master(), other, config=CONFIG, **options)
    (tmp_path / f"iteration-{ITERATIONS + 2}" / "shard-0.pt").write_bytes(b"no snapshot")
    with pytest.raises(ValueError, match=r"shard-0\.pt can't be read"):
        serve(master(), network(), config=CONFIG, **options)


def test_how_often_snapshots_are_taken_is_a_number():
    with pytest.raises(ValueError, match="save_every is 0"):
        coordinate(master(), shards=1, config=SandblasterConfig(portions=2), save_every=0)


def test_a_state_goes_on_bit_for_bit():
    whole, cutting = begin(CONFIG), begin(CONFIG)
    whole[0].run(ITERATIONS + 2)
    cutting[0].run(ITERATIONS)
    other = begin(CONFIG)
    other[0].load_state_dict(cutting[0].state_dict())
    for new, old in zip(other[1].shards, cutting[1].shards, strict=True):
        new.load_state_dict(old.state_dict())
    report = other[0].run(2)
    assert torch.equal(parameters_of(other[1]), parameters_of(whole[1]))
    assert report == whole[0].run(0)
    wrong = {**old.state_dict(), "point": torch.zeros(3)}
    with pytest.raises(ValueError, match="the snapshot's point is"):
        old.load_state_dict(wrong)
