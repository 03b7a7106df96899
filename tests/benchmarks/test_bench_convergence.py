"""Finished runs become rows; others are left out, and different tasks are not compared."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.instruments import report
from benchmarks.training.bench_convergence import finished_runs, rows_of
from pyops.config import Config, OptimizerConfig, TrainConfig

pytestmark = pytest.mark.cpu_only

STEPS = 10


def write_run(
    folder: Path,
    *,
    optimizer: str,
    seed: int,
    loss: float,
    sent: list[int] | None = None,
    steps: int = STEPS,
) -> None:
    name = f"{optimizer}-{seed}-{steps}"
    config = Config(
        name,
        optimizer=OptimizerConfig(name=optimizer),
        train=TrainConfig(num_steps=steps, seed=seed),
    )
    (folder / name).mkdir(parents=True)
    (folder / name / "config.json").write_text(json.dumps(asdict(config)))
    rows = [
        {
            "step": step,
            "loss": 3.0,
            **({"bytes_sent": sent[step], "compression": 8000 / sent[step]} if sent else {}),
        }
        for step in range(steps)
    ]
    rows[-1]["validation_loss"] = loss
    (folder / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_row_per_optimizer_beside_adamw_seed_by_seed(tmp_path):
    sent = [8000] * 4 + [200] * 6
    for seed, (base, ours) in enumerate([(1.0, 1.02), (2.0, 2.0)]):
        write_run(tmp_path, optimizer="adamw", seed=seed, loss=base)
        write_run(tmp_path, optimizer="onebit_adam", seed=seed, loss=ours, sent=sent)
    write_run(
        tmp_path, optimizer="onebit_adam", seed=2, loss=9.0, sent=sent
    )  # no AdamW of this seed
    first, second = rows_of(finished_runs(tmp_path))
    assert first["case"] == "adamw, 10 steps, batch 32, 2 seeds"
    assert first["validation_loss"] == 1.5
    assert "percent_of_loss" not in first
    assert second["percent_by_seed"] == {"0": 2.0, "1": 0.0}
    assert second["percent_of_loss"] == pytest.approx(1.0)
    assert (second["wire_ratio"], second["switch"]) == (40.0, [4])
    assert "| 40.0x | 4.007 | +1.00 % |" in report.table([first, second])


def test_unfinished_runs_and_other_tasks_are_not_compared(tmp_path, capsys):
    write_run(tmp_path, optimizer="adamw", seed=0, loss=1.0, steps=5)
    write_run(tmp_path, optimizer="lamb", seed=0, loss=1.5)
    write_run(tmp_path, optimizer="lion", seed=0, loss=1.5)
    path = tmp_path / "lion-0-10" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    rows = rows_of(finished_runs(tmp_path))
    assert sorted(row["case"].split(",")[0] for row in rows) == ["adamw", "lamb"]
    assert not any("percent_of_loss" in row for row in rows)
    assert "lion-0-10 has 9 of its 10 steps: left out" in capsys.readouterr().out
