"""`pyops train` with states in files, in a process that may not have as much memory as the states
take."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ZeroConfig
from pyops.train import train
from tests.train.tiny_run import config_of, losses
from tests.workers import ROOT

pytestmark = pytest.mark.cpu_only

MIB = 1 << 20
CHILD = """
import pickle, resource, sys
from pathlib import Path
import torch
from pyops.train import train

warm_up, config, resume, limit = pickle.loads(Path(sys.argv[1]).read_bytes())
torch.set_num_threads(1)
train(warm_up)  # what a run imports, and whatever libraries keep
if limit:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    allowed = int(status["VmData"].split()[0]) * 1024 + limit
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
train(config, resume=resume)
"""


def train_in_a_process(
    folder: Path, config: Config, *, resume: bool = False, limit: int = 0
) -> str:
    """Train in a process of `limit` bytes beyond what a tiny run has taken; the process' errors, ""
    for none."""
    file = folder / "given.pickle"
    warm_up = config_of(folder, "cpu", name="warm-up", num_steps=3, stage=1, precision="bf16")
    file.write_bytes(pickle.dumps((warm_up, config, resume, limit)))
    # By default malloc keeps what was freed below a threshold that grows, one heap for each thread:
    # holes, as chance has it.
    fixed = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | fixed,
    )
    return done.stderr if done.returncode else ""


def large(folder: Path, *, name: str, offload: str, steps: int = 4) -> Config:
    """8 M parameters of 16 bits: 32 MiB with their gradients, and 96 MiB of states."""
    config = config_of(
        folder,
        "cpu",
        name=name,
        precision="bf16",
        num_steps=steps,
        batch=2,
        bucket_bytes=MIB,
        optimizer={"lr": 1e-3},
    )
    model = dataclasses.replace(config.model, dim=512, num_heads=4, num_layers=3, hidden=1728)
    return dataclasses.replace(
        config, model=model, zero=ZeroConfig(1, offload=offload, tile_bytes=1 << 20)
    )


@pytest.mark.full  # writes hundreds of megabytes
def test_states_that_no_memory_could_hold(tmp_path):
    """Built, trained, saved, resumed and saved again, with a limit that states alone would
    break."""
    plain, limit = large(tmp_path, name="plain", offload="none"), 84 * MIB
    train(plain)  # without a limit it needs no process of its own
    for steps, resume in ((2, False), (4, True)):
        config = large(tmp_path, name="limited", offload=str(tmp_path), steps=steps)
        assert not train_in_a_process(tmp_path, config, resume=resume, limit=limit)
    assert losses(config) == losses(plain)
    assert losses(plain)[-1] < losses(plain)[0]
    ours, theirs = (
        load(tmp_path / "runs" / name / "checkpoints" / "step-00000004")[0]
        for name in ("limited", "plain")
    )
    assert (
        sum(t.nbytes for states in ours["optimizer"].values() for t in states.values())
        > 95 * MIB
        > limit
    )
    for name, states in theirs["optimizer"].items():
        assert torch.equal(ours["model"][name], theirs["model"][name])
        assert all(
            torch.equal(ours["optimizer"][name][key], value) for key, value in states.items()
        )
    words = train_in_a_process(tmp_path, dataclasses.replace(plain, name="too much"), limit=limit)
    assert "memory" in words, "the limit holds"
