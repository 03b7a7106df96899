"""run.html is one well-formed file that has the run's numbers and loads nothing."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pyops.cli import main
from pyops.flight_record import FlightRecord
from pyops.observe.page import MOST_POINTS, page_of, write_page
from pyops.train import train
from tests.train.tiny_run import config_of

pytestmark = pytest.mark.cpu_only


class Checked(HTMLParser):
    """Every tag that is opened is closed, in order; paths and texts are kept."""

    VOID = ("meta", "!doctype")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.paths: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag == "path":
            self.paths.append(dict(attributes)["d"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        return None

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def run(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_page_has_the_curves_the_configuration_and_the_collectives(tmp_path):
    rows = [{"step": i, "loss": 3.0 - i, "lr": 0.1, "goodput": 0.5} for i in range(3)]
    rows[1]["loss"] = None
    folder = run(tmp_path / "a <run>", [*rows, {"step": 3, "loss": 0.0, "validation_loss": 1.5}])
    (folder / "config.json").write_text('{"model": {"dim": 16}, "name": "x & y"}')
    FlightRecord(folder / "flight", rank=0, size=2).begin("barrier", group=("0", (0, 1)))
    text = page_of(folder)
    page = Checked(text)
    assert "http" not in text.replace("http-equiv", "")
    assert "src=" not in text
    assert "a <run>" in page.texts
    assert "model.dim" in page.texts
    assert "x & y" in page.texts
    assert any("rank 1 left no record" in each for each in page.texts)
    loss = next(path for path in page.paths if path.startswith("M70.0 "))
    assert loss.count("L") == 2, "three losses are numbers"
    assert loss.endswith(" 192.0"), "the lowest lies on the axis"


def test_many_steps_become_few_points_and_a_cut_line_is_left_out(tmp_path):
    folder = run(tmp_path, [{"step": i, "loss": 1.0 + i % 2} for i in range(10_000)])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 100')
    page = Checked(page_of(folder))
    assert max(path.count("L") for path in page.paths) < MOST_POINTS
    assert "10,000" in page.texts


def test_a_run_leaves_its_page_and_the_command_writes_it_anew(tmp_path, capsys):
    config = config_of(tmp_path, "cpu", num_steps=3)
    train(config)
    path = config.folder / "run.html"
    assert f"page of the run: {path}" in capsys.readouterr().out
    first = path.read_text()
    Checked(first)
    path.unlink()
    assert main(["page", str(config.folder)]) == 0
    assert path.read_text() == first
    assert main(["page", str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err


def test_a_folder_that_can_not_be_written_is_an_error_of_its_own(tmp_path):
    folder = run(tmp_path, [{"step": 0, "loss": 1.0}])
    (folder / "run.html.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_page(folder)
