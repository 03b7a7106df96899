"""The bench of distillation at sizes that take seconds: its runs, which go on, and its row."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks.compress import bench_distillation as bench
from benchmarks.instruments.verdicts import verdicts
from pyops.data import DataConfig
from pyops.train.report.metrics import read_rows

pytestmark = pytest.mark.cpu_only


@pytest.mark.full  # the rows of other benches are checked in the suite, and its step below
def test_a_row_of_a_teacher_and_its_students(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sizes = bench.Sizes(
        layers=2,
        dim=8,
        pretraining_steps=2,
        batch=8,
        passages=2,
        teacher_epochs=1,
        student_epochs=1,
        seeds=1,
        words=258,
        max_bytes=1 << 16,
        folder=str(tmp_path / "runs"),
    )
    row = bench.passages_row(sizes)
    assert json.loads(json.dumps(row)) == row
    assert list(row["accuracy_by_method"]) == ["teacher", "student alone", "student distilled"]
    teacher, alone, distilled = (each[0] for each in row["accuracy_by_method"].values())
    assert row["of_teacher"] == pytest.approx(distilled / teacher, abs=1e-4)
    assert row["points_above_alone"] == pytest.approx(distilled - alone, abs=0.01)
    assert len(list(verdicts(row))) == 2
    own, other = (
        read_rows(tmp_path / "runs" / f"student-{name}-0" / "metrics.jsonl")[0]["loss"]
        for name in ("alone", "distilled")
    )
    assert own != other, "the same loss with and without a teacher"
    metrics = tmp_path / "runs" / "teacher-0" / "metrics.jsonl"
    before = metrics.read_text()
    again = bench.passages_row(sizes)
    assert again["accuracy_by_method"] == row["accuracy_by_method"]
    assert metrics.read_text() == before, "a finished run was trained again"
    place = DataConfig("stdlib", max_bytes=sizes.max_bytes, validation_fraction=0.25)
    found = {}
    contexts = {"test": nullcontext(), "left out": bench.scored_on_what_is_left_out(sizes)}
    for name, context in contexts.items():
        with context:
            found[name] = bench.passage_tasks.prepare_passages(place, vocab_size=258, length=64)
    train, left = found["test"].train, found["left out"].held_out
    assert len(left) >= 8
    assert left.stream.equal(train.stream), "of the training part, not of the ends that are tested"
    learnt, rest, every = (
        {tuple(place) for place in rows.places.tolist()} for rows in (train.fewer(2), left, train)
    )
    assert rest <= every - learnt
    assert found["left out"].train.places.equal(train.places)


def test_all_three_steps_are_of_the_same_models():
    torch.manual_seed(0)
    given = bench.operands(16, 8, 40)
    assert bench.check(given) < 1e-4
    assert float(bench.take(bench.parts, given)) > 1
