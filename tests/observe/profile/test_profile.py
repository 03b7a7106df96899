"""`pyops profile`: operations equal hand counts, the profile changes no bit, one trace has all
ranks."""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pyops.cli import main
from pyops.cli.observing import profile
from pyops.models import GPT, GPTConfig
from pyops.observe.profile.measuring import StepProfile, profile_steps
from pyops.observe.profile.operations import measured_peak, utilization
from pyops.observe.profile.parts import OUTSIDE, Part
from pyops.observe.profile.table import Peak, profile_text
from pyops.observe.profile.trace import memory_of, merge, peak_of

pytestmark = pytest.mark.cpu_only

CONFIG = GPTConfig(
    sequence_length=16, num_layers=2, num_heads=4, num_kv_heads=2, dim=32, vocab_size=256
)
ROWS = 3


class Training:
    """A GPT and its steps."""

    def __init__(self) -> None:
        self.model = GPT(CONFIG, seed=0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def step(self) -> None:
        tokens = torch.arange(ROWS * 17).view(ROWS, 17) % 256
        loss = self.model(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))


@pytest.fixture(scope="module")
def profiled() -> tuple[StepProfile, Training]:
    training = Training()
    found = profile_steps(
        training.step, training.model, device=torch.device("cpu"), steps=1, warmup=1
    )
    return found, training


def test_operations_equal_hand_counts_by_module(profiled):
    found, _ = profiled
    tokens, dim, kv = ROWS * 16, 32, 16
    products = {
        "attention": 2 * dim * dim + 2 * dim * kv,  # queries and output, keys and values
        "mlp": 2 * dim * CONFIG.mlp_width,
    }
    scores = 7 * 2 * ROWS * 16 * 16 * dim  # two products in forward, five in backward
    for block in range(2):
        counted = {
            name: sum(
                number
                for part, number in found.operations.items()
                if part.name.startswith(f"blocks.{block}.{name}")
            )
            for name in products
        }
        assert counted["mlp"] == 6 * tokens * products["mlp"]
        assert counted["attention"] == 6 * tokens * products["attention"] + scores
    head = 6 * tokens * dim * 256
    blocks = 2 * (6 * tokens * sum(products.values()) + scores)
    assert found.total_operations == blocks + head


def test_the_profile_changes_no_bit(profiled):
    _, training = profiled
    other = Training()
    for _ in training.losses:
        other.step()
    assert other.losses == training.losses
    for mine, theirs in zip(other.model.parameters(), training.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_parts_sum_up_to_the_step(profiled):
    found, _ = profiled
    assert sum(found.totals.values()) == pytest.approx(found.profiled_seconds, rel=1e-9)
    names = {part.name for part in found.totals}
    assert {"blocks.0.mlp", "blocks.1.attention", "optimizer", OUTSIDE} <= names
    both = {part.phase for part in found.totals if part.name.startswith("blocks.1.mlp")}
    assert both == {"forward", "backward"}


def test_the_trace_has_operations_parts_and_memory_on_one_clock(profiled):
    found, _ = profiled
    events = found.trace["traceEvents"]
    work = [e for e in events if e.get("cat") == "cpu_op"]
    parts = [e for e in events if e.get("cat") == "part"]
    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    assert parts
    middle = [e for e in parts if e["name"].startswith("blocks.1")]
    assert all(first <= e["ts"] <= last for e in middle)
    inside = [
        w
        for w in work
        if w["name"] == "pyops::attention_forward"
        and any(
            e["name"].startswith("blocks.0.attention") and e["ts"] <= w["ts"] <= e["ts"] + e["dur"]
            for e in parts
        )
    ]
    assert len(inside) == 1
    points = memory_of(found.trace)
    assert len(points) > 10
    assert found.peak_bytes == max(p.nbytes for p in points) - points[0].nbytes > 0
    assert peak_of({"traceEvents": []}) == (0, "")


def test_traces_of_ranks_become_one_on_the_clock_of_rank_0(tmp_path):
    def trace(base: int) -> dict[str, Any]:
        event = {"ph": "X", "name": "work", "pid": 9, "tid": 4, "ts": 5.0, "dur": 1.0}
        return {"traceEvents": [event], "baseTimeNanoseconds": base}

    path = tmp_path / "all.json.gz"
    merge([trace(1_000_000), trace(4_000_000)], path, offsets=[0, 2_000_000])
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    work = {e["pid"]: e["ts"] for e in events if e["ph"] == "X"}
    assert work == {0: 5.0, 1: 5.0 + 1000.0}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}


def a_profile(seconds: float, operations: int, again: int = 0) -> StepProfile:
    totals = {Part("", "forward"): seconds}
    counts = {Part("", "forward"): operations}
    return StepProfile(seconds, seconds, totals, counts, again, {"": 10}, 2**20, "the model")


def test_utilization_of_a_known_step_names_its_convention():
    assert utilization(3e12, seconds=2.0, peak=6e12) == 0.25
    text = profile_text([a_profile(2.0, 4 * 10**12, 10**12)] * 2, peaks=[Peak(6e12, "made up")])
    assert "MFU 25.0% of 6 TFLOP/s (made up)" in text
    assert "6000 GFLOP a step, 3 TFLOP/s; 2000 GFLOP more computed again" in text
    assert "five products in backward" in text
    with pytest.raises(ValueError, match="seconds is 0"):
        utilization(1.0, seconds=0, peak=1.0)
    assert measured_peak(torch.device("cpu"), torch.float32, width=8, seconds=0) > 0


def test_bad_numbers_are_refused():
    with pytest.raises(ValueError, match="steps is 0"):
        profile_steps(lambda: None, nn.Linear(1, 1), device=torch.device("cpu"), steps=0)


def run_command(rank: int, group: Any, config: str, trace: str) -> str:
    return profile(argparse.Namespace(config=config, overrides=[], steps=1, depth=1, trace=trace))


def test_the_command_over_two_ranks(world, tmp_path):
    toml = tmp_path / "small.toml"
    toml.write_text(
        "[model]\nsequence_length = 16\nnum_layers = 2\nnum_heads = 2\ndim = 16\n"
        '[train]\nbatch = 4\ndevice = "cpu"\n'
    )
    path = tmp_path / "step.json"
    first, second = world(2).run(run_command, str(toml), str(path))
    assert first == second
    assert [line.split()[0] for line in first.splitlines() if line[:4].strip().isdigit()] == [
        "0",
        "1",
    ]
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert "waiting" in first


def test_the_command_refuses_what_it_can_not_profile(tmp_path, capsys):
    toml = Path(tmp_path / "bad.toml")
    toml.write_text('[task]\nkind = "digits"\n[train]\ndevice = "cpu"\n')
    assert main(["profile", str(toml)]) == 2
    toml.write_text('[train]\ndevice = "cpu"\n')
    assert main(["profile", str(toml), "--steps", "0"]) == 2
    assert "--steps is 0" in capsys.readouterr().err
