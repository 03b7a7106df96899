"""A rank killed with -9: the others end with an error, the last checkpoint is whole, and torchrun's
restart goes on from it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pyops import failure
from pyops.checkpoint import Checkpoints, load
from pyops.comm.failure import CommunicationError
from pyops.config import Config
from pyops.mesh import Mesh
from pyops.parallel.trainer import trainer
from pyops.train import train
from tests.grids import full
from tests.train.faults.killed_run import train_and_die
from tests.train.tiny_run import STEPS, config_of, losses, same, train_on_rank
from tests.workers import fork_server, spawn_ranks

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).resolve().parents[3]


def as_toml(config: Config) -> str:
    """The configuration as a file that says the same."""
    lines = [f'name = "{config.name}"']
    for each in dataclasses.fields(config):
        section = getattr(config, each.name)
        if dataclasses.is_dataclass(section) and each.metadata.get("toml", True):
            lines.append(f"[{each.name}]")
            lines += [
                f"{option.name} = {_value(getattr(section, option.name))}"
                for option in dataclasses.fields(section)
                if option.metadata.get("toml", True)
            ]
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    return repr(value)


def broken_and_straight(folder: Path, stage: int, reference: Any) -> tuple[Config, Config]:
    given = {"stage": stage, "checkpoint_every": 5, "num_checkpoints": 3}
    broken = config_of(folder, "cpu", name="broken", **given)
    return broken, reference(dataclasses.replace(broken, name="straight"))


def check_resumed(broken: Config, straight: Config) -> None:
    """The run that went on is as if no rank had been killed."""
    assert (broken.folder.parent / "killed").exists(), "no rank was killed"
    assert same(losses(broken), losses(straight)), "not as without the fault"
    whole = [
        load(broken.folder / "checkpoints" / f"step-{step:08}")[0]["step"]
        for step in (10, 15, STEPS)
    ]
    assert whole == [10, 15, STEPS]
    assert not list((broken.folder / "checkpoints").glob("*.tmp"))


def _resumed_from(told: str) -> None:
    resumed = re.findall(r"resumed from \S*step-(\d+)", told)
    assert len(resumed) == 1, told
    assert int(resumed[0]) in (5, 10), (
        "10 may not have been whole yet, it is written in the background"
    )


def _restarted(config: Config, where: str, step: int) -> None:
    """A rank of torchrun's agent, with the variables that it sets."""
    torch.set_num_threads(1)
    train_and_die(int(os.environ["RANK"]), None, config, where, step)


# tests/cluster kills ranks under torchrun itself, and .ci/run runs it; without an agent, ranks that
# are killed and go on stand below.
@pytest.mark.full
def test_torchruns_agent_starts_a_killed_rank_again(tmp_path, reference):
    """In this process, with ranks of the fork server, which need not import torch."""
    broken, straight = broken_and_straight(tmp_path, 2, reference)
    fork_server()
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=1,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path / "logs"), redirects=Std.ALL),
    )
    elastic_launch(launch, _restarted)(broken, "step", 12)
    _resumed_from("".join(path.read_text() for path in tmp_path.glob("logs/**/*.log")))
    check_resumed(broken, straight)


@pytest.mark.full  # its agent is above, without a process of its own
def test_torchrun_starts_a_killed_rank_again(tmp_path, reference):
    broken, straight = broken_and_straight(tmp_path, 2, reference)
    (tmp_path / "run.toml").write_text(as_toml(broken))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = Path(__file__).with_name("killed_run.py")
    command = [
        *(sys.executable, *torchrun, "--max-restarts", "1"),
        *(str(script), str(tmp_path / "run.toml"), "step", "12"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=150
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    _resumed_from(told)
    check_resumed(broken, straight)


@pytest.mark.parametrize("where", [full("gather"), "save"])
def test_a_killed_rank(world, tmp_path, reference, where):
    broken, straight = broken_and_straight(tmp_path, 3, reference)
    first, second = spawn_ranks(2, train_and_die, broken, where, 12, group_timeout=10)
    assert second.exitcode == -signal.SIGKILL
    assert first.error is not None
    assert "CommunicationError" in first.error
    latest = Checkpoints(broken.folder / "checkpoints").latest()
    assert latest is not None
    assert latest.name in ("step-00000005", "step-00000010")
    world(2).run(train_on_rank, broken, True)
    check_resumed(broken, straight)


def _killed_before_losses_are_summed(rank: int, group: Any, config: Config) -> str:
    failure.PATIENCE = 1.0  # seconds for the note of the only other rank, which is dead
    inner, calls = trainer.sum_over_copies, itertools.count()

    def dying(total: float, mesh: Mesh, **options: Any) -> float:
        if next(calls) == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(total, mesh, **options)

    trainer.sum_over_copies = dying
    try:
        train(config)
    except CommunicationError as error:
        return str(error)
    return "trained"


def test_a_rank_that_dies_before_losses_are_summed_is_named(tmp_path):
    config = config_of(tmp_path, "cpu", stage=3)
    first, second = spawn_ranks(
        2, _killed_before_losses_are_summed, config, timeout=60, group_timeout=10
    )
    assert second.exitcode == -signal.SIGKILL
    assert first.error is None, first.error
    assert "the sum of losses failed because rank 1 died or stalled" in first.result
