"""A supervised run in processes of the fork server, of which some are killed before a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pyops import failure
from pyops.comm.collectives.communicator import Communicator
from pyops.config import Config
from pyops.launch.supervisor import Supervisor
from pyops.train import TextTraining, train
from tests.workers import COSTS, DTYPES, fork_server


class Started:
    """A process of multiprocessing, as a supervisor asks for it."""

    def __init__(self, process: Any) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def rank_of_run(
    variables: Mapping[str, str], config: Config, notes: Path, victims: Sequence[int], step: int
) -> None:
    """Train as a rank; the first processes of `victims` are killed before `step`. Each process
    notes the steps that it begins."""
    os.environ.update(variables)
    torch.set_num_threads(1)
    Communicator.presumed_costs = {("cpu", dtype): COSTS for dtype in DTYPES}
    failure.PATIENCE = 1.0  # seconds for the notes of ranks that were killed
    inner, killed = TextTraining.train_step, notes / f"killed {variables['RANK']}"
    own = notes / f"steps of rank {variables['RANK']}, process {os.getpid()}"

    def train_step(self: TextTraining, *, stop: bool = False) -> Any:
        with own.open("a") as file:
            file.write(f"{self.step}\n")
        if self.rank in victims and self.step == step and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(self, stop=stop)

    TextTraining.train_step = train_step  # type: ignore[method-assign]
    train(config)


def supervised(
    config: Config, notes: Path, *, victims: Sequence[int], step: int, ranks: int = 2
) -> tuple[int, list[str]]:
    """Run the ranks to their end; the exit code, and what the supervisor told."""
    context, told = fork_server(), []

    def start(variables: Mapping[str, str]) -> Started:
        process = context.Process(
            target=rank_of_run, args=(dict(variables), config, notes, victims, step)
        )
        process.start()
        return Started(process)

    supervisor = Supervisor(start, ranks=ranks, most_idle=3, tell=told.append)
    return supervisor.run(), told


def steps_begun(notes: Path, rank: int) -> list[list[int]]:
    """The steps that each process of a rank began, first process first."""
    files = sorted(
        notes.glob(f"steps of rank {rank},*"),
        key=lambda path: int(path.read_text().splitlines()[0]),
    )
    return [[int(line) for line in path.read_text().splitlines()] for path in files]
