"""Runs whose ranks are killed at random moments, under each launcher: started again, they have the
losses of a run that nothing disturbed."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyops.config import Config, ObserveConfig
from tests.cluster.slurm import running, unpacked
from tests.cluster.test_launchers import HERE, RUN, needs_mpi
from tests.train.faults.test_faults import as_toml
from tests.train.tiny_run import config_of, losses, train_on_rank
from tests.workers import ROOT, mpirun

pytestmark = [pytest.mark.cpu_only, pytest.mark.cluster]

STEPS, PAUSE = (
    150,
    100,
)  # of a run; milliseconds before each step, so that there is time to be killed
LONGEST = 8.0  # seconds of an attempt after which a rank may be killed: its start takes about five
MANY = pytest.param(20, 250, marks=pytest.mark.full)  # kills, steps
FEW = pytest.param(2, 100)  # of 10 seconds, of which at most 8 come before the second kill


def straight(world: Any, folder: Path, steps: int) -> list[float]:
    """The losses of two ranks that nothing disturbs."""
    config = config_of(folder, "cpu", name="straight", stage=1, num_steps=steps)
    world(2).run(train_on_rank, config)
    return losses(config)


def written(folder: Path, steps: int) -> tuple[Config, str]:
    """The configuration, with a checkpoint every other step, and its file."""
    config = config_of(folder, "cpu", stage=1, num_steps=steps, checkpoint_every=2)
    config = dataclasses.replace(config, observe=ObserveConfig(max_idle_restarts=0))
    (folder / "run.toml").write_text(as_toml(config))
    return config, str(folder / "run.toml")


def ranks_of(file: str) -> list[int]:
    """The processes of a run's ranks, whoever started them."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        at = (
            words.index("tests.cluster.launched_run")
            if "tests.cluster.launched_run" in words
            else 0
        )
        if at and file in words and words[at - 1] == "-m" and "python" in words[0]:
            found.append(int(process.name))
    return [each for each in found if "torch.distributed.run" not in _words(each)]


def _words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def kill_one(file: str, drawn: random.Random) -> bool:
    """SIGKILL to one of the ranks; whether there was one."""
    ranks = ranks_of(file)
    if not ranks:
        return False
    try:
        os.kill(drawn.choice(ranks), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def gone(file: str) -> None:
    """Wait until no rank is left."""
    until = time.monotonic() + 60
    while ranks_of(file):
        assert time.monotonic() < until, "ranks outlive the launcher that lost one"
        time.sleep(0.1)


def begun(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("ab") as output:
        return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=output, stderr=output)


def again_and_again(
    attempt: Callable[[list[str]], bool], file: str, config: Config, *, kills: int
) -> None:
    """Attempts that are killed, by a launcher that does not start a run again by itself, and a last
    one that is not.

    Args:
        attempt: Start with these options; kill, where it is told to; whether the run ended well.
    """
    for _ in range(kills):
        assert not attempt(_options(config)), "the run ended before it was killed often enough"
        gone(file)
    assert attempt(_options(config))


def survived(
    launched: subprocess.Popen[bytes],
    file: str,
    config: Config,
    drawn: random.Random,
    left: list[int],
) -> bool:
    """Kill one of the launched ranks, while kills are left; whether the run ended well.

    Every other kill is at a moment that may lie in the start, and those between them come when the
    attempt has taken some steps more than those before, so that the run goes on at any load.
    """
    before = steps_taken(config)
    while left[0]:
        if left[0] % 2:
            target = before + drawn.randint(2, 8)
            while steps_taken(config) < target and launched.poll() is None:
                time.sleep(0.05)
        else:
            time.sleep(drawn.uniform(0.5, LONGEST))
        if kill_one(file, drawn):
            left[0] -= 1
            break
        if launched.poll() is not None:
            break
    return launched.wait(600) == 0  # seconds, on a busy machine


def steps_taken(config: Config) -> int:
    """Of all attempts."""
    rows = config.folder / "metrics.jsonl"
    return rows.read_text().count("\n") if rows.exists() else 0


def check_resumed(log: Path, *, kills: int) -> None:
    """A run that begins anew has the same losses: attempts say from which checkpoint they go on,
    and that their first step is the one behind it."""
    said = log.read_text()
    events = re.findall(r"resumed from \S*step-(\d+)|begins step (\d+)", said)
    resumed = [
        (int(checkpoint), int(following[1]))
        for (checkpoint, _), following in itertools.pairwise(events)
        if checkpoint and following[1]  # none where the attempt was killed between the two
    ]
    assert len(resumed) >= kills // 2, said[-3000:]
    assert all(step == checkpoint > 0 for checkpoint, step in resumed), resumed


def _options(config: Config) -> list[str]:
    has = any((config.folder / "checkpoints").glob("step-*"))
    return ["--resume"] if has else []


@pytest.mark.parametrize(("kills", "steps"), [FEW, MANY])
def test_torchrun_starts_a_killed_run_again(world, tmp_path, kills, steps):
    config, file = written(tmp_path, steps)
    drawn, log = random.Random(kills), tmp_path / "log"
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [sys.executable, *agent, "--max-restarts", str(kills), *RUN[1:], file, str(PAUSE)]
    running_agent = begun(words, log)
    done = 0
    while not (config.folder / "metrics.jsonl").exists() or len(losses(config)) < 4:
        time.sleep(0.2)  # of which there is a checkpoint
        assert running_agent.poll() is None, log.read_text()[-3000:]
    while done < kills:
        time.sleep(drawn.uniform(0.5, LONGEST if kills > 2 else LONGEST / 2))
        assert running_agent.poll() is None, log.read_text()[-3000:]
        done += kill_one(file, drawn)
    assert running_agent.wait(180) == 0, log.read_text()[-3000:]
    check_resumed(log, kills=2)
    assert losses(config) == straight(world, tmp_path, steps)  # bit for bit


@pytest.mark.parametrize(("kills", "steps"), [MANY])
def test_mpirun_started_again_goes_on(world, tmp_path, kills, steps):
    needs_mpi()
    config, file = written(tmp_path, steps)
    drawn, log, left = random.Random(kills), tmp_path / "log", [kills]

    def attempt(options: list[str]) -> bool:
        launched = begun([*mpirun(2), *RUN, file, str(PAUSE), *options], log)
        return survived(launched, file, config, drawn, left)

    again_and_again(attempt, file, config, kills=kills)
    check_resumed(log, kills=kills)
    assert losses(config) == straight(world, tmp_path, steps)  # bit for bit


@pytest.mark.parametrize(("kills", "steps"), [MANY])
def test_srun_started_again_goes_on(world, tmp_path, kills, steps, tmp_path_factory):
    config, file = written(tmp_path, steps)
    drawn, log, left = random.Random(kills), tmp_path / "log", [kills]
    cache = Path(os.environ.get("PYOPS_SLURM", ROOT / "build" / "slurm"))
    with running(tmp_path_factory.mktemp("slurm") / "files", unpacked(cache)) as slurm:
        slurm.environment.update(HERE)

        def attempt(options: list[str]) -> bool:
            words = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1", *RUN, file, str(PAUSE), *options]
            with log.open("ab") as output:
                launched = subprocess.Popen(
                    words, cwd=ROOT, env=slurm.environment, stdout=output, stderr=output
                )
            return survived(launched, file, config, drawn, left)

        again_and_again(attempt, file, config, kills=kills)
    check_resumed(log, kills=kills)
    assert losses(config) == straight(world, tmp_path, steps)  # bit for bit
