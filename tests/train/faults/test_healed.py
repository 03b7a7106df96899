"""A rank of `pyops train` that is killed is replaced, and the others go on with what they have: the
losses are those of a run in which no rank was lost."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, HealingConfig
from pyops.train import train
from pyops.train.report.metrics import read_rows
from tests.grids import full
from tests.train.faults.healed_run import steps_begun, supervised
from tests.train.faults.test_faults import as_toml
from tests.train.tiny_run import STEPS, config_of, losses, norms

pytestmark = pytest.mark.cpu_only

LEASE = 2.0  # seconds
ROOT = Path(__file__).resolve().parents[3]


def healing_config(folder: Path, *, stage: int, copy_every: int = 1) -> Config:
    """Without a checkpoint before the last step: no state comes from the disk."""
    config = config_of(folder, "cpu", name="healed", stage=stage, dropout=0.1, checkpoint_every=0)
    # Nobody may have to wait for the timeout of collectives, which is longer than a test.
    healing = HealingConfig(copy_every, lease=LEASE, timeout=300.0, meeting_timeout=400.0)
    return dataclasses.replace(config, healing=healing)


def undisturbed(config: Config) -> Config:
    return dataclasses.replace(config, healing=HealingConfig())


def seconds_outside_steps(config: Config, step: int) -> float:
    """Between the ends of a step and of the one before, by what the goodput counts as lost."""
    rows = read_rows(config.folder / "metrics.jsonl")
    assert all(0 < row["goodput"] < 1 for row in rows)
    seconds = list(itertools.accumulate(row["step_s"] for row in rows))
    passed = [good / row["goodput"] for good, row in zip(seconds, rows, strict=True)]
    return passed[step] - passed[step - 1] - rows[step]["step_s"]


def check_as_undisturbed(healed: Config, straight: Config) -> None:
    """The same metrics, once for each step, and the same model at the end, bit for bit."""
    rows = read_rows(healed.folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert losses(healed) == losses(straight)
    assert norms(healed) == norms(straight)
    ours, theirs = (
        load(each.folder / "checkpoints" / f"step-{STEPS:08}")[0] for each in (healed, straight)
    )
    assert ours["data"] == theirs["data"]
    assert ours["model"].keys() == theirs["model"].keys()
    for name, tensor in ours["model"].items():
        assert torch.equal(tensor, theirs["model"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "victim", "copy_every"),
    [full(0, 0, 1), (1, 1, 3), full(0, 1, 3), full(1, 0, 1)],
)
def test_a_rank_that_is_killed_is_replaced(tmp_path, reference, stage, victim, copy_every):
    config = healing_config(tmp_path, stage=stage, copy_every=copy_every)
    step = random.Random(10 * stage + victim).randrange(4, STEPS - 3)
    code, told = supervised(config, tmp_path, victims=(victim,), step=step)
    assert code == 0, told
    assert len(told) == 1
    assert f"rank {victim} (process" in told[0]
    assert "died of SIGKILL" in told[0]
    again = step - step % copy_every
    assert steps_begun(tmp_path, 1 - victim) == [[*range(step + 1), *range(again, STEPS)]]
    assert sorted(steps_begun(tmp_path, victim)) == [
        [*range(step + 1)],
        [*range(again, STEPS)],
    ]
    check_as_undisturbed(config, reference(undisturbed(config), 2))
    assert seconds_outside_steps(config, again) >= LEASE


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "victims"),
    [
        pytest.param(2, (0, 1), id="all"),
        pytest.param(3, (1, 2), id="a rank and the neighbor with its copies"),
    ],
)
def test_a_state_that_is_lost_is_that_of_the_newest_checkpoint(tmp_path, reference, ranks, victims):
    config = healing_config(tmp_path, stage=1)
    options = dataclasses.replace(config.train, batch=6, checkpoint_every=5)
    config = dataclasses.replace(config, train=options)
    code, told = supervised(config, tmp_path, victims=victims, step=13, ranks=ranks)
    assert code == 0, told
    assert len(told) == len(victims)
    for victim in victims:
        _, again = steps_begun(tmp_path, victim)
        # The newest checkpoint may not have been whole yet: it is written in the background.
        assert again in ([*range(5, STEPS)], [*range(10, STEPS)])
    check_as_undisturbed(config, reference(undisturbed(config), ranks))


@pytest.mark.full  # the cases above start ranks of the fork server in the place of processes
def test_pyops_launch_replaces_a_rank(tmp_path, reference):
    config = healing_config(tmp_path, stage=1)
    (tmp_path / "run.toml").write_text(as_toml(config))
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, threading, time, signal, pathlib\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "def watch():\n"
        f"    log = pathlib.Path({str(config.folder / 'metrics.jsonl')!r})\n"
        "    while not log.exists() or log.read_text().count('\\n') < 5:\n"
        "        time.sleep(0.005)\n"
        "    (folder / 'killed').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if os.environ.get('RANK') == '1' and not (folder / 'killed').exists():\n"
        "    threading.Thread(target=watch, daemon=True).start()\n"
    )
    command = ["-m", "pyops", "launch", str(tmp_path / "run.toml"), "--ranks-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert (tmp_path / "killed").exists()
    assert told.count("died of SIGKILL") == 1, told
    assert told.count("healed: from step") == 1, told
    check_as_undisturbed(config, reference(undisturbed(config), 2))


def test_a_gpu_that_is_there_is_refused_before_anything_starts(tmp_path, monkeypatch):
    config = healing_config(tmp_path, stage=0)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, device="auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"train.device is 'auto', which is a GPU here; set it"):
        train(config)
    assert not config.folder.exists()


def test_a_run_whose_ranks_nobody_replaces_is_refused(tmp_path):
    config = healing_config(tmp_path, stage=0, copy_every=2)
    with pytest.raises(
        ConfigError, match=r"healing.copy_every is 2, but nobody starts .*pyops launch"
    ):
        train(config)
    assert not config.folder.exists()
