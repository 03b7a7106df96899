"""A run that Slurm's time limit or a preemption ended is requeued, once, by rank 0, if steps are
left."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyops.launch.requeue import requeue
from pyops.train import train
from pyops.train.host.ranks import StopRequest
from pyops.train.host.run_folder import continues
from pyops.train.loop import StepResult
from pyops.train.text_training import TextTraining
from tests.train.tiny_run import STEPS, config_of, losses, same

pytestmark = pytest.mark.cpu_only

SCONTROL = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = show ] && echo "JobId=31 JobState={state} Requeue={allowed} Restarts=0"
exit {code}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Put a scontrol on the PATH that notes what it was asked; gives its log's reader."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    log = tmp_path / "log"

    def make(*, state: str = "RUNNING", allowed: int = 1, code: int = 0) -> Any:
        file = tmp_path / "bin" / "scontrol"
        file.parent.mkdir(exist_ok=True)
        file.write_text(SCONTROL.format(log=log, state=state, allowed=allowed, code=code))
        file.chmod(0o755)
        return lambda: log.read_text().splitlines() if log.exists() else []

    return make


def test_a_job_is_requeued(slurm):
    asked = slurm()
    assert "is requeued" in requeue(signal.SIGUSR1, progressed=True)
    assert asked() == ["show job 31", "requeue 31"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state": "CANCELLED"}, "is CANCELLED: not requeued"),
        ({"allowed": 0}, "sbatch --requeue"),
        ({"code": 1}, "scontrol show says"),
    ],
)
def test_what_is_not_to_be_requeued_is_not(slurm, given, said):
    asked = slurm(**given)
    assert said in requeue(signal.SIGTERM, progressed=True)
    assert asked() == ["show job 31"]


def test_a_person_or_no_slurm_or_no_progress(slurm, monkeypatch):
    asked = slurm()
    assert requeue(signal.SIGINT, progressed=True) == ""
    assert requeue(signal.SIGUSR1, progressed=True, environment={}) == ""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert "took no step since" in requeue(signal.SIGUSR1, progressed=False)
    assert asked() == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install Slurm's client" in requeue(signal.SIGUSR1, progressed=True)


def signalled(monkeypatch: pytest.MonkeyPatch, number: int, *, step: int, rank: int = 0) -> None:
    """The signal comes twice to this rank while the step is computed."""
    inner = TextTraining.train_step

    def stopping(self: TextTraining, *, stop: bool = False) -> Any:
        if self.step == step and int(os.environ.get("RANK", 0)) == rank:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        return inner(self, stop=stop)

    monkeypatch.setattr(TextTraining, "train_step", stopping)


def test_a_run_under_slurm_goes_on_where_the_time_limit_ended_it(slurm, tmp_path, monkeypatch):
    asked = slurm()
    config = config_of(tmp_path, "cpu")
    straight = config_of(tmp_path, "cpu", name="straight")
    with monkeypatch.context() as patch:
        signalled(patch, signal.SIGUSR1, step=7)
        outcome = train(config)
    assert outcome.stopped_by == signal.SIGUSR1
    assert asked() == ["show job 31", "requeue 31"]
    # The same job, without --resume.
    outcome = train(config)
    assert (outcome.steps, outcome.stopped_by) == (STEPS, 0)
    train(straight)
    assert same(losses(config), losses(straight))
    assert len(asked()) == 2
    # Another job of that name begins anew.
    monkeypatch.setenv("SLURM_JOB_ID", "32")
    train(config)
    assert Path(f"{config.folder}.1").is_dir()


def test_nothing_is_requeued_when_no_step_is_left(slurm, tmp_path, monkeypatch):
    asked = slurm()
    signalled(monkeypatch, signal.SIGUSR1, step=STEPS - 1)
    train(config_of(tmp_path, "cpu"))
    assert asked() == []


def test_a_training_that_stops_with_its_last_step_has_ended(slurm, tmp_path, monkeypatch):
    """A `Training` may say "stop" with the last step, too; the next job of Slurm begins anew."""
    asked = slurm()
    config = config_of(tmp_path, "cpu")
    inner = TextTraining.steps

    def stopping(self: TextTraining, request: StopRequest) -> Iterator[StepResult]:
        for result in inner(self, request):
            yield dataclasses.replace(result, stop=result.stop or self.is_over)

    with monkeypatch.context() as patch:
        patch.setattr(TextTraining, "steps", stopping)
        signalled(patch, signal.SIGUSR1, step=STEPS - 1)
        outcome = train(config)
    assert (outcome.steps, outcome.stopped_by) == (STEPS, 0)
    assert asked() == []
    assert not continues(config.folder)


def _stopped(rank: int, group: Any, config: Any, path: str) -> int:
    before = dict(os.environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", SLURM_JOB_ID="31", PATH=path)
    try:
        with pytest.MonkeyPatch.context() as patch:
            signalled(patch, signal.SIGUSR1, step=3, rank=1)
            return train(config).stopped_by
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_signal_to_one_rank_is_one_checkpoint_and_one_requeue(slurm, world, tmp_path):
    asked = slurm()
    config = config_of(tmp_path, "cpu")
    found = world(2).run(_stopped, config, os.environ["PATH"])
    assert found == [signal.SIGUSR1, signal.SIGUSR1]
    assert asked() == ["show job 31", "requeue 31"]
    assert len(list((config.folder / "checkpoints").glob("step-*"))) == 1
