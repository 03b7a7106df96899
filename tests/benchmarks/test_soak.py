"""The soak of `benchmarks.training.soak`: two of its runs, and what it calls a failure."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.training import soak

pytestmark = pytest.mark.cpu_only


@pytest.mark.full  # ranks are killed at random instants: a search, not a gate
def test_two_runs(tmp_path, capsys):
    assert (
        soak.main(["--runs", "2", "--only", "zero 3, 2 ranks", "--folder", str(tmp_path)]) == 0
    ), capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["resumed", "resumed"]
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize(
    ("losses", "left", "verdict"),
    [
        ([2.0, 1.0], False, "resumed"),
        ([2.0, 1.5], False, "FAIL: losses differ by 0.5"),
        ([2.0], False, "FAIL: 1 losses, of a run that nobody killed 2"),
        ([2.0, 1.0], True, "FAIL: step-4.tmp was left behind"),
    ],
)
def test_verdicts(tmp_path, monkeypatch, losses, left, verdict):
    place = soak.Place(tmp_path, "dp 2", 20.0)
    if left:
        (place.run / "checkpoints" / "step-4.tmp").mkdir(parents=True)
    monkeypatch.setattr(soak, "_through_bare", lambda place, result, straight, limit: result)
    monkeypatch.setattr(soak.Place, "losses", lambda self: losses)
    moment = soak.Moment("step", 1, 3, 0.5)
    found = soak.one(
        place, soak.Result(0, "dp 2", 2, "bare", moment), soak.Reference([2.0, 1.0], 1.0, 0.1), 60.0
    )
    assert found.verdict == verdict


def test_the_runs_are_drawn_from_their_number_alone():
    layouts = list(soak.LAYOUTS)
    first, again = (
        [soak.drawn(i, layouts, random.Random(f"0 {i}")) for i in range(100)] for _ in range(2)
    )
    assert first == again
    assert {result.layout for result in first} == set(layouts)
    assert {result.moment.kind for result in first} == {"start", "step", "save", "change"}
    assert {result.how for result in first} == {"bare", "torchrun"}
    assert all(result.moment.victim < result.ranks for result in first)
