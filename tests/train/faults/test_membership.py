"""Ranks that are lost and come back: torchrun starts the others again, in another layout, and the
run goes on as if nothing had been."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import TCPStore

from pyops.cli import main
from pyops.config import Config, ZeroConfig
from pyops.config.parallel_config import ParallelConfig
from pyops.train import train
from pyops.train.report.metrics import read_rows
from tests.train.faults.test_faults import ROOT, as_toml
from tests.train.tiny_run import STEPS, config_of, losses, same
from tests.workers import fork_server

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Config:
    """A run of one process."""
    config = config_of(
        tmp_path_factory.mktemp("straight"),
        "cpu",
        name="straight",
        micro_batch=2,
        num_sample_tokens=0,
    )
    train(config)
    return config


def start(folder: Path, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with open(folder / f"said-by-{name}", "w") as log:
        return subprocess.Popen(
            [sys.executable, *command], env=given, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )


class Rank:
    """`pyops train run.toml` in a process that the tests' fork server starts, which has imported
    pyops already."""

    def __init__(self, folder: Path, **environment: str) -> None:
        log = folder / f"said-by-{environment['RANK']}"
        given = (str(folder), str(log), {"OMP_NUM_THREADS": "1", **environment})
        self._process = fork_server().Process(target=_main, args=given)
        self._process.start()

    def wait(self, timeout: float) -> int | None:
        """The exit code."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _main(folder: str, log: str, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(main(["train", "run.toml"]))


def ends(processes: Sequence[Any], folder: Path) -> tuple[list[int | None], str]:
    """Exit codes, and what was said; None for a process that did not end in time."""
    until, codes = time.monotonic() + 300, []
    for each in processes:
        try:
            codes.append(each.wait(timeout=max(0.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
    for each in processes:
        # Ranks of an agent that is killed would go on without it.
        running = isinstance(each, subprocess.Popen) and each.poll() is None
        ranks = psutil.Process(each.pid).children(recursive=True) if running else []
        for process in (each, *ranks):
            process.kill()
    said = [f"--- {path.name}\n{path.read_text()}" for path in sorted(folder.glob("said-by-*"))]
    return codes, "".join(said)


def agent(folder: Path, name: str, *, port: int) -> subprocess.Popen[bytes]:
    """One node's torchrun, with one process. The store in which they meet is the test's, so any of
    them may be lost."""
    options = [
        "--nnodes",
        "1:3",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "5",
        "--monitor-interval",
        "0.3",
    ]
    options += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "a-run",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
    ]
    # On a busy machine an agent may be seconds late: a round that closes without it would be one
    # of a single rank, which nobody stops, and an agent that says nothing for long counts as lost.
    options += [
        "--rdzv-conf",
        "is_host=false,last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=12",
    ]
    script = [str(Path(__file__).with_name("lost_run.py")), str(folder / "run.toml"), str(folder)]
    return start(
        folder,
        name,
        "-m",
        "torch.distributed.run",
        *options,
        "--local-addr",
        "127.0.0.1",
        *script,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )


@pytest.mark.full  # three agents and nine starts: half a minute of two cores
def test_a_lost_node_comes_back(tmp_path, straight):
    """3 stages; 2 after the loss of the node of rank 0, half way through a checkpoint; 3 again."""
    config = dataclasses.replace(
        config_of(
            tmp_path,
            "cpu",
            micro_batch=2,
            checkpoint_every=4,
            num_checkpoints=10,
            num_sample_tokens=0,
        ),
        parallel=ParallelConfig(pp=3, adapt=True),
        zero=ZeroConfig(1),
    )
    (tmp_path / "run.toml").write_text(as_toml(config))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [agent(tmp_path, name, port=store.port) for name in "abc"]
    until = time.monotonic() + 180
    while (
        not (tmp_path / "waits").exists()
        and time.monotonic() < until
        and any(each.poll() is None for each in agents)
    ):
        time.sleep(0.05)
    codes, told = ends([*agents, agent(tmp_path, "d", port=store.port)], tmp_path)
    assert sorted(codes, key=str) == [-9, 0, 0, 0], told
    assert [row["step"] for row in read_rows(config.folder / "metrics.jsonl")] == list(
        range(STEPS)
    ), told
    assert same(losses(config), losses(straight), within=1e-6), told
    assert sorted(re.findall(r"resumed from \S*step-0*(\d+)", told), key=int) == ["4", "7"], told
    assert "tp 1 x pp 2 x dp 1: tp 1 x pp 3 takes 3 ranks, and there are 2" in told
    assert not (config.folder / ".launch").exists(), "a finished run begins anew"


def test_a_rank_that_is_not_needed_waits(tmp_path, straight):
    """8 sequences are not for 3 models: 2 train, and the third rank ends with them."""
    config = dataclasses.replace(
        config_of(tmp_path, "cpu", num_sample_tokens=0), parallel=ParallelConfig(adapt=True)
    )
    (tmp_path / "run.toml").write_text(as_toml(config))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [Rank(tmp_path, RANK=str(rank), WORLD_SIZE="3", **where) for rank in range(3)]
    codes, told = ends(ranks, tmp_path)
    assert codes == [0, 0, 0], told
    assert (
        "tp 1 x pp 1 x dp 2: as asked for; 1 of 3 ranks waits, as 3 models can't share a batch of 8"
        in told
    )
    assert same(losses(config), losses(straight))
