"""Validation losses of finished `pyops train` runs beside AdamW's of the same length, data and
seeds: a row per optimizer.

    python -m benchmarks.training.bench_convergence --train onebit_adam
        trains what is missing, for hours
    python -m benchmarks convergence
        reads runs/convergence/*, writes rows

A run is a folder with config.json and metrics.jsonl; what it is called does not matter. Runs on a
text or a model of another size are not compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.instruments import harness, machine, report
from pyops.train.report.metrics import read_rows

__all__ = ["Finished", "finished_runs", "main", "rows_of", "run", "stamp"]

FOLDER = report.ROOT / "runs" / "convergence"
CONFIG = report.ROOT / "examples" / "gpt_small.toml"
STEPS, BATCH, WARMUP, SEEDS = 2000, 8, 400, (0, 1, 2)
WARMUPS = {"zero_one_adam": "auto"}  # a fifth of the run
REFERENCE = "adamw"
AIM = 1.0  # percent above AdamW's loss
Row = dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """A run that took all its steps. task: what must be equal for a comparison. wire_ratio: times
    fewer bytes than fp32 from step `switch` on; None: unknown."""

    optimizer: str
    seed: int
    task: tuple[Any, ...]
    loss: float
    wire_ratio: float | None
    switch: int | None


def _traffic(rows: list[Row], *, whole_run: bool) -> tuple[float | None, int | None]:
    """(times fewer bytes than fp32 from a step on, that step): the switch, or the beginning."""
    first = rows[0]
    if "compression" not in first:
        return None, None
    whole = first["compression"] * first["bytes_sent"]
    switch = next((row["step"] for row in rows if row["bytes_sent"] < 0.6 * whole), None)
    if switch is None:
        return None, None
    switch = 0 if whole_run else switch
    sent = [row["bytes_sent"] for row in rows if row["step"] >= switch]
    return whole * len(sent) / sum(sent), switch


def _read(folder: Path) -> Finished | None:
    config, rows = (
        json.loads((folder / "config.json").read_text()),
        read_rows(folder / "metrics.jsonl"),
    )
    steps = config["train"]["num_steps"]
    if len(rows) < steps or "validation_loss" not in rows[-1]:
        print(f"{folder} has {len(rows)} of its {steps} steps: left out")
        return None
    name, codec = (
        config["optimizer"].get("name", "adamw"),
        config.get("communication", {}).get("codec", "none"),
    )
    task = (
        steps,
        config["train"]["batch"],
        json.dumps(config["model"], sort_keys=True),
        config["data"]["path"],
    )
    ratio, switch = _traffic(
        rows, whole_run=name == "zero_one_adam"
    )  # which has no switch, but a schedule
    kind = name if codec == "none" else f"{name}, {codec}"
    return Finished(kind, config["train"]["seed"], task, rows[-1]["validation_loss"], ratio, switch)


def finished_runs(folder: Path) -> list[Finished]:
    """Every finished run below `folder`."""
    found = [
        _read(path.parent)
        for path in sorted(folder.rglob("config.json"))
        if (path.parent / "metrics.jsonl").exists()
    ]
    return [each for each in found if each is not None]


def rows_of(runs: Iterable[Finished]) -> list[Row]:
    """A row per optimizer and task: the mean loss over seeds, and beside AdamW's seed by seed.

    "percent_of_loss": the mean over seeds of how far the loss is above AdamW's with the same seed,
    in percent.
    """
    tasks: dict[tuple[Any, ...], dict[str, dict[int, Finished]]] = {}
    for each in runs:
        tasks.setdefault(each.task, {}).setdefault(each.optimizer, {})[each.seed] = each
    found = []
    for (steps, batch, *_), kinds in tasks.items():
        reference = kinds.get(REFERENCE, {})
        for kind in sorted(kinds, key=lambda k: (k != REFERENCE, k)):
            seeds = kinds[kind]
            row: Row = {
                "bench": "convergence",
                "case": f"{kind}, {steps} steps, batch {batch}, {len(seeds)} seeds",
                "device": "cpu",
                "us": {},
                "speedup": {},
                "validation_loss": statistics.fmean(each.loss for each in seeds.values()),
                "losses": {str(seed): round(each.loss, 5) for seed, each in sorted(seeds.items())},
            }
            if kind != REFERENCE and (common := sorted(set(seeds) & set(reference))):
                above = {
                    seed: 100 * (seeds[seed].loss / reference[seed].loss - 1) for seed in common
                }
                row |= {
                    "percent_of_loss": round(statistics.fmean(above.values()), 3),
                    "aim_percent": AIM,
                }
                row["percent_by_seed"] = {
                    str(seed): round(value, 3) for seed, value in above.items()
                }
            ratios = [each.wire_ratio for each in seeds.values() if each.wire_ratio is not None]
            if ratios:
                row["wire_ratio"] = round(statistics.fmean(ratios), 2)
                row["switch"] = sorted(
                    {each.switch for each in seeds.values() if each.switch is not None}
                )
            found.append(row | stamp())
    return found


def stamp() -> Row:
    """Where and when a row without timings was made, by one thread."""
    return {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _print(row: Row) -> None:
    beside = ""
    if "percent_of_loss" in row:
        verdict = "meets" if row["percent_of_loss"] <= row["aim_percent"] else "ABOVE"
        beside = (
            f" | {row['percent_of_loss']:+.2f} % of AdamW's ({verdict} "
            f"{row['aim_percent']:g} %), {row['percent_by_seed']}"
        )
    wire = (
        f" | {row['wire_ratio']:.1f}x fewer bytes from step {row['switch']}"
        if "wire_ratio" in row
        else ""
    )
    print(f"{row['case']:<52} loss {row['validation_loss']:.4f}{beside}{wire}", flush=True)


def run(options: Any) -> list[Row]:
    """The rows of the runs in runs/convergence; none when there are none."""
    rows = [
        row
        for row in rows_of(finished_runs(FOLDER))
        if options.only is None or options.only in row["case"]
    ]
    for row in rows:
        _print(row)
    if not rows:
        print(
            "no finished runs in runs/convergence: python -m "
            "benchmarks.training.bench_convergence --train adamw onebit_adam"
        )
    return rows


def _train(name: str, seed: int, *, folder: Path) -> None:
    overrides = {
        "name": f"{name}-{seed}",
        "train.folder": str(folder),
        "train.num_steps": STEPS,
        "train.batch": BATCH,
        "train.seed": seed,
        "train.validate_every": 200,
        "train.checkpoint_every": 0,
        "train.log_every": 100,
        "optimizer.name": name,
        "optimizer.compression_warmup_steps": WARMUPS.get(name, WARMUP),
    }
    settings = [part for key, value in overrides.items() for part in ("--set", f"{key}={value}")]
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "pyops",
        "train",
        str(CONFIG),
    ]
    subprocess.run([sys.executable, *command, *settings], check=True)


def main() -> int:
    """Train what is missing, then read, print, and append the rows; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.bench_convergence", description="Losses beside AdamW's."
    )
    parser.add_argument(
        "--train",
        nargs="*",
        default=[],
        metavar="OPTIMIZER",
        help="train these where a seed is missing",
    )
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the runs are")
    parser.add_argument(
        "--save",
        action="store_true",
        help="append the rows to benchmarks/results, write the tables",
    )
    given = parser.parse_args()
    for seed in given.seeds:
        for name in given.train:
            if not any(
                each.optimizer == name and each.seed == seed for each in finished_runs(given.folder)
            ):
                _train(name, seed, folder=given.folder)
    rows = rows_of(finished_runs(given.folder))
    for row in rows:
        _print(row)
    if given.save:
        harness.append_rows(rows)
        report.write_tables()
    return 0


if __name__ == "__main__":
    sys.exit(main())
