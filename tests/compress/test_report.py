"""The table, the JSON and the picture say what a report holds, each number in its place."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyops.compress import CompressReport, Spread, StageReport
from pyops.compress.picture import check_picture, draw
from pyops.config import ConfigError

pytestmark = pytest.mark.cpu_only

BEFORE = StageReport(
    name="before",
    method="",
    options={},
    num_parameters=4000,
    file_bytes=16_000,
    tensor_bytes=20_000,
    loss=1.25,
    accuracy=0.5,
    token_ms=Spread(2.0, 1.0, 4.0),
    batch_ms=Spread(30.0, 20.0, 50.0),
)
AFTER = StageReport(
    name="prune",
    method="prune",
    options={"sparsity": 0.25},
    num_parameters=4000,
    num_pruned=1000,
    file_bytes=8000,
    tensor_bytes=15_000,
    loss=1.5,
    accuracy=0.375,
    token_ms=Spread(1.5, 1.25, 1.75),
    batch_ms=Spread(25.0, 15.0, 45.0),
    seconds=7.0,
    facts={"last_loss": 2.0},
)
REPORT = CompressReport(
    folder="in",
    output="out",
    num_ranks=2,
    num_threads=3,
    device="cpu",
    num_tokens=1234,
    batch_shape=(4, 32),
    stages=(BEFORE, AFTER),
)
ROWS = [
    ["before", "4,000", "16 kB (100%)", "20 kB (100%)", "1.2500", "50.00 %", "2 (1 to 4)",
     "30 (20 to 50)"],
    ["1 prune", "3,000", "8 kB (50%)", "15 kB (75%)", "1.5000", "37.50 %", "1.5 (1.25 to 1.75)",
     "25 (15 to 45)"],
]  # fmt: skip


def test_the_cells_of_the_table():
    assert REPORT.rows() == ROWS
    untimed = replace(REPORT, stages=(replace(BEFORE, token_ms=None, batch_ms=None),))
    assert untimed.rows()[0][-2:] == ["-", "-"]


@pytest.mark.parametrize("plain", [False, True], ids=["rich", "plain"])
def test_the_table(monkeypatch, plain):
    if plain:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    else:
        pytest.importorskip("rich")
    lines = REPORT.table(width=140).splitlines()
    for row, name in zip(ROWS, ("before", "1 prune"), strict=True):
        (line,) = [each for each in lines if name in each and "kB" in each]
        places = [line.index(cell) for cell in row]
        assert places == sorted(places)
    said = " ".join(" ".join(lines).split())
    assert "1,234 tokens held out" in said
    assert "2 x cpu, 3 threads" in said
    assert "a batch is 4 x 32 tokens" in said
    assert ("in -> out" in said) != plain


def test_the_json():
    told = json.loads(REPORT.as_json())
    assert told["batch_shape"] == [4, 32]
    assert told["stages"][1] == {
        **{k: getattr(AFTER, k) for k in vars(AFTER)},
        "token_ms": vars(AFTER.token_ms),
        "batch_ms": vars(AFTER.batch_ms),
    }


def drawn(report: CompressReport, monkeypatch: Any, path: Path) -> list[Any]:
    """The axes of the picture."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw(report, path)
    monkeypatch.undo()
    (figure,) = figures
    pyplot.close(figure)
    assert path.stat().st_size > 0
    axes: list[Any] = figure.axes
    return axes


@pytest.mark.full
def test_the_picture(monkeypatch, tmp_path):
    accuracy, loss, token, batch = drawn(REPORT, monkeypatch, tmp_path / "a.svg")
    for axes, values in ((accuracy, [50.0, 37.5]), (loss, [1.25, 1.5])):
        points = [tuple(each.get_offsets()[0]) for each in axes.collections]
        assert points == [(0.016, values[0]), (0.008, values[1])]
        assert [each.get_text() for each in axes.texts] == ["before", "prune"]
    for axes, values in ((token, [2.0, 1.5]), (batch, [30.0, 25.0])):
        assert [bar.get_width() for bar in axes.patches] == values
    assert [each.get_text() for each in token.get_yticklabels()] == ["before", "prune"]
    ends = [each.get_segments()[0][:, 0].tolist() for each in token.collections]
    assert ends == [[1.0, 4.0], [1.25, 1.75]]
    assert batch.get_title() == "forward of 4 x 32 tokens, ms"
    stages = tuple(replace(each, token_ms=None, batch_ms=None) for each in REPORT.stages)
    assert len(drawn(replace(REPORT, stages=stages), monkeypatch, tmp_path / "b.svg")) == 2


def test_a_picture_that_nothing_can_draw_is_refused(monkeypatch):
    monkeypatch.setattr("pyops.compress.picture.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="matplotlib is not installed: pip install"):
        check_picture()
