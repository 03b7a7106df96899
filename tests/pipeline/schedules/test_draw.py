"""Pictures, text and traces show the timeline that was simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Costs, Pipeline, Timeline, custom, draw, schedule, simulate, text, trace

pytestmark = pytest.mark.cpu_only


def test_text_is_the_papers_figure():
    timeline = simulate(schedule("1f1b", num_stages=2, num_microbatches=3), Costs(1, 0.5, 0.5))
    assert text(timeline).splitlines() == [
        "  0 | 0  1  .  0' 2  1' .  2'",
        "  1 | .  0  0' 1  1' 2  2' .",
    ]
    assert text(timeline, width=15).splitlines()[0] == "  0 | 0  1  ."


def test_text_marks_every_kind():
    timeline = simulate(custom(["0F0 0R0 0I0 0W0 0U0"]), Costs(1, 1, 1, step=1))
    assert text(timeline) == "  0 | 0  0~ 0' 0\" 0!"


@pytest.mark.parametrize("ending", [".svg", ".png"])
def test_pictures_are_written(tmp_path: Path, ending: str):
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    timeline = simulate(schedule("zbv", num_stages=3, num_microbatches=5), Costs(1, 1, 1))
    path = draw(timeline, tmp_path / "deep" / f"zbv{ending}")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG" if ending == ".png" else b"<?xml")
    if ending == ".svg":
        assert data.count(b'<path d="M') >= 3 * 2 * 3 * 5  # F, I and W of two stages on each rank


def test_pictures_that_cannot_be_are_refused(tmp_path: Path):
    timeline = simulate(schedule("gpipe", num_stages=2, num_microbatches=2))
    with pytest.raises(ValueError, match=r"give it the ending \.svg"):
        draw(timeline, tmp_path / "a.txt")
    many = simulate(schedule("gpipe", num_stages=1, num_microbatches=3000))
    with pytest.raises(ValueError, match="6000 actions are too many"):
        draw(many, tmp_path / "a.svg")
    assert not list(tmp_path.iterdir())


def test_a_trace_has_every_action_and_transfer(tmp_path: Path):
    timeline = simulate(
        schedule("1f1b", num_stages=2, num_microbatches=3), Costs(1, 1, 1, latency=0.5)
    )
    events = json.loads(trace(timeline, tmp_path / "t.json", seconds_per_unit=1e-3).read_text())[
        "traceEvents"
    ]
    assert len(events) == 2 * 2 * 3 + 2 * 3
    first = next(e for e in events if e["name"] == "1F0")
    assert (first["ts"], first["dur"], first["tid"]) == (1500.0, 1000.0, "rank 1")
    assert {e["tid"] for e in events if e["pid"] == "channels"} == {
        "0 to 1, activations",
        "1 to 0, gradients",
    }


def test_simulated_and_measured_stand_side_by_side(tmp_path: Path):
    made = schedule("zb1p", num_stages=2, num_microbatches=3)
    pipeline = Pipeline(
        [nn.Linear(4, 4) for _ in range(4)], schedule=made, group=ALONE, loss=nn.functional.mse_loss
    )
    with pipeline.recording() as found:
        pipeline.step(torch.randn(6, 4), torch.randn(6, 4))
    late = {what: (begin + 5, end + 5) for what, (begin, end) in found[0].actions.items()}
    path = trace(
        {"simulated": simulate(made), "measured": Timeline(made, late)}, tmp_path / "t.json"
    )
    events = json.loads(path.read_text())["traceEvents"]
    for title in ("simulated", "measured"):
        ours = [e for e in events if e["pid"] == f"{title} ranks"]
        assert {e["name"] for e in ours} == {str(action) for _, action in made}
        assert min(e["ts"] for e in ours) == 0
        assert all(e["dur"] >= 0 for e in ours)


def test_text_fits_a_long_timeline():
    timeline = simulate(
        schedule("1f1b", num_stages=2, num_microbatches=3),
        Costs([1.0, 1.0], [0.01, 5.0], [1.0, 5.0]),
    )
    lines = text(timeline, width=66, fit=True).splitlines()
    assert max(map(len, lines)) <= 66
    assert len(lines[1]) > 50
    assert "2'" in lines[1]
