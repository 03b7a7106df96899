"""What the bench of elastic training reckons from a run's metrics, by hand."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch

from benchmarks.elastic import bench_reading
from benchmarks.elastic.bench_elastic import (
    ALL,
    BASELINE,
    VARIANTS,
    Taken,
    _finished,
    row_of,
    taken,
)
from benchmarks.instruments import report
from pyops.config import Config, TaskConfig
from pyops.elastic import ActivationCache

pytestmark = pytest.mark.cpu_only

LAYOUT = {"frozen": 0, "stages": 2, "replicas": 1, "micro_batches": 4, "cached": False}


def run_of(step: float, *, transition: float = 0.0, accuracy: float = 0.9) -> list[dict[str, Any]]:
    """Two epochs of three steps of 8 samples; scoring takes a second, after the first epoch comes a
    transition."""
    rows, now = [], 100.0
    for epoch in range(2):
        for number in range(3):
            now += step
            rows.append(
                {
                    "step": 3 * epoch + number,
                    "epoch": epoch,
                    "time": now,
                    "samples_per_s": 8 / step,
                    **LAYOUT,
                }
            )
        rows[-1]["validation_accuracy"] = accuracy
        if epoch == 0 and transition:
            rows[-1]["transition_s"] = transition
        now += 1.0 + (transition if epoch == 0 else 0.0)
    return rows


def test_time_is_of_training_and_of_transitions_not_of_scoring():
    found = taken(run_of(0.5, transition=0.25, accuracy=0.75), batch=8, samples=24)
    assert found.seconds == pytest.approx(6 * 0.5 + 0.25)
    assert found.whole == pytest.approx(6 * 0.5 + 0.25 + 1.0)
    assert found.accuracy == 0.75
    assert found.transitions == (0.25,)
    assert found.share == pytest.approx(0.25 / 1.5)
    assert [each["samples_per_s"] for each in found.epochs] == [16.0, 16.0]
    assert [each["seconds"] for each in found.epochs] == [1.5, 1.5]
    plain = taken(run_of(0.5), batch=8, samples=24)
    assert (plain.transitions, plain.share) == ((), 0.0)


def test_the_largest_part_of_an_epoch_need_not_be_the_longest_transition():
    epochs = tuple(
        {"transition_s": transition, "seconds": seconds}
        for transition, seconds in ((0.2, 10.0), (0.1, 2.0), (0.0, 1.0))
    )
    assert Taken(13.3, 14.0, 0.9, (0.2, 0.1), epochs).share == pytest.approx(0.05)


def test_what_to_begin_with_is_trained_again_for_another_configuration(tmp_path):
    config = Config(name="before", task=TaskConfig(num_epochs=3))
    assert not _finished(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "epoch": 2, "validation_loss": 1.0}\n')
    assert not _finished(tmp_path, config), "it has no checkpoint"
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert _finished(tmp_path, config)
    other = dataclasses.replace(config.optimizer, weight_decay=1.0)
    assert not _finished(tmp_path, dataclasses.replace(config, optimizer=other))
    saved = dataclasses.asdict(config)
    del saved["optimizer"]["layer_decay"]  # as one of a time that knew no such key
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert _finished(tmp_path, config)
    del saved["optimizer"]["weight_decay"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    other = dataclasses.replace(config.optimizer, weight_decay=1.0)
    assert not _finished(tmp_path, dataclasses.replace(config, optimizer=other)), (
        "the key was left at its default"
    )
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    for row in ('{"step": 6, "epoch": 1, "validation_loss": 1.0}', '{"step": 8, "epoch": 2}'):
        (tmp_path / "metrics.jsonl").write_text(row + "\n")
        assert not _finished(tmp_path, config), "it was interrupted"


def test_a_table_names_the_commits_of_all_its_rows():
    stamp = {
        "machine": {"cpu": "some", "cores": 2, "threads": 1},
        "versions": {"torch": "2"},
        "date": "today",
    }
    assert report.heading([{**stamp, "commit": commit} for commit in ("a", "b", "a")]).endswith(
        "commit a, b, today:"
    )


def test_ratios_are_of_one_seed_each():
    def several(steps: list[float], accuracies: list[float]) -> list[Any]:
        return [
            taken(run_of(s, accuracy=a), batch=8, samples=24)
            for s, a in zip(steps, accuracies, strict=True)
        ]

    found = {
        BASELINE: several([1.0, 2.0, 1.0], [0.90, 0.91, 0.92]),
        ALL: several([0.5, 0.5, 1.0], [0.91, 0.91, 0.93]),
    }
    row = row_of("digits, 2 processes", ALL, found)
    assert row["speedup"] == {BASELINE: 2.0}
    assert row["us"][ALL][1] == pytest.approx(3e6)
    assert row["points"] == pytest.approx(0.67)
    assert row["accuracy"] == [91.0, 91.0, 93.0]
    assert row_of("digits, 2 processes", BASELINE, found)["speedup"] == {}
    made = report.table([row])
    assert "2.00x (aim 1.82x)" in made
    assert "+0.67" in made


def test_each_variant_adds_one_thing():
    names = list(VARIANTS)
    assert names[0] == BASELINE
    assert names[-1] == ALL
    off = [
        sum(value in ("false", "off") for value in VARIANTS[name].values()) for name in names[1:]
    ]
    assert off == [3, 2, 1, 0]


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_read_is_compared_with_what_is_computed(tmp_path, monkeypatch, disk):
    made = bench_reading.case(1, str(tmp_path) if disk else None)
    assert made.check() == 0.0
    assert made.facts["keep_us"] > 0
    get = ActivationCache.get

    def wrong(self, *args, **named):
        values, there = get(self, *args, **named)
        return torch.nextafter(values, torch.tensor(9.0)), there

    monkeypatch.setattr(ActivationCache, "get", wrong)
    with pytest.raises(AssertionError, match="what is read is not what is computed"):
        made.check()
    monkeypatch.setattr(
        ActivationCache,
        "get",
        lambda self, samples, **_: (torch.zeros(1), torch.zeros(len(samples)).bool()),
    )
    with pytest.raises(AssertionError, match="what is read is not what is computed"):
        made.check()
