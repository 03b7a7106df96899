"""Elastic training beside the same pipeline without freezing: time to the end of the last epoch,
and accuracy over seeds.

    no freezing   a pipeline on all processes (several: and data parallel), every layer trained to
                  the end
    freeze only   frozen layers want no gradients, the layout stays while there are layers for it
    + AutoPipe    fewer stages as layers freeze; processes set free are idle
    + AutoDP      they become replicas
    + AutoCache   what frozen layers say is read where that is faster

Each round is a seed, in which all take turns; a ratio is of one round. Runs are `pyops train` of
examples/, under torchrun, one thread for each process, from weights that are trained first. Time is
of training and of changing layouts: scoring the held-out samples after each epoch, which all do
alike, is left out; `whole_s` has it.

    python -m benchmarks elastic --only "digits, 4"        --rounds 3: seeds 0, 1, 2
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.instruments import harness, machine, report
from pyops.config import Config, load_config
from pyops.train.report.metrics import read_rows

__all__ = ["BASELINE", "VARIANTS", "Taken", "row_of", "run", "taken"]

BASELINE, ALL = "no freezing", "+ AutoCache"
OFF = {"elastic.compress": "false", "elastic.replicate": "false", "elastic.cache": "off"}
VARIANTS: dict[str, dict[str, str]] = {
    BASELINE: {"elastic.freeze": "none"},
    "freeze only": OFF,
    "+ AutoPipe": {**OFF, "elastic.compress": "true"},
    "+ AutoDP": {**OFF, "elastic.compress": "true", "elastic.replicate": "true"},
    ALL: {},
}
CASES = (
    ("digits", 4),
    ("digits", 2),
    ("passages", 2),
)  # processes, which begin as the stages of one pipeline
CONFIGS = {"digits": "vit_digits", "passages": "bert_passages"}
SEEDS = 3
AIM = 1 / 0.55
FOLDER = report.ROOT / "runs" / "elastic"
Row = dict[str, Any]


@dataclass(frozen=True)
class Taken:
    """What a run took. seconds: of training and of transitions; whole: with scoring. epochs: a row
    for each."""

    seconds: float
    whole: float
    accuracy: float
    transitions: tuple[float, ...]
    epochs: tuple[Row, ...]

    @property
    def share(self) -> float:
        """The largest part that a transition is of the epoch before it."""
        pairs = [
            (each["transition_s"], each["seconds"]) for each in self.epochs if each["transition_s"]
        ]
        return max((transition / seconds for transition, seconds in pairs), default=0.0)


def taken(rows: Sequence[Row], *, batch: int, samples: int) -> Taken:
    """Of a finished run's metrics. batch: of a whole step, which the first of an epoch is."""
    by_epoch = [list(some) for _, some in itertools.groupby(rows, key=lambda row: row["epoch"])]
    epochs: list[Row] = []
    left_out, start = 0.0, 0.0
    ends: float | None = None
    for some in by_epoch:
        first, last = some[0], some[-1]
        begins = first["time"] - batch / first["samples_per_s"]
        start = begins if ends is None else start
        transition = last.get("transition_s", 0.0)
        if ends is not None:
            left_out += begins - ends - epochs[-1]["transition_s"]
        ends = last["time"]
        seconds = ends - begins
        epochs.append(
            {
                "epoch": first["epoch"],
                "seconds": round(seconds, 3),
                "samples_per_s": round(samples / seconds, 1),
                "transition_s": round(transition, 3),
                "accuracy": round(last["validation_accuracy"], 4),
                **{
                    key: last[key]
                    for key in ("frozen", "stages", "replicas", "micro_batches", "cached")
                },
            }
        )
    assert ends is not None
    changes = tuple(each["transition_s"] for each in epochs if each["transition_s"])
    return Taken(
        ends - start - left_out,
        ends - start,
        rows[-1]["validation_accuracy"],
        changes,
        tuple(epochs),
    )


def row_of(case: str, variant: str, found: Mapping[str, Sequence[Taken]]) -> Row:
    """A row of results. found: of each variant, a run for each seed."""
    ours, base = found[variant], found[BASELINE]
    row: Row = {
        "bench": "elastic",
        "case": f"{case}, {variant}",
        "device": "cpu",
        "us": {
            name: harness.quantiles([each.seconds for each in found[name]])
            for name in dict.fromkeys((variant, BASELINE))
        },
        "speedup": {},
        "whole_s": [round(each.whole, 2) for each in ours],
        "accuracy": [round(100 * each.accuracy, 2) for each in ours],
        "points": round(
            100
            * statistics.fmean(a.accuracy - b.accuracy for a, b in zip(ours, base, strict=True)),
            2,
        ),
        "transitions_s": [list(each.transitions) for each in ours],
        "transition_share": round(max(each.share for each in ours), 4),
        "epochs": list(ours[0].epochs),
        "rounds": len(ours),
        "max_error": None,
    }
    if variant != BASELINE:
        ratios = [b.seconds / a.seconds for a, b in zip(ours, base, strict=True)]
        row["speedup"] = {BASELINE: round(statistics.median(ratios), 3)}
    if variant == ALL:
        row["targets"] = {BASELINE: round(AIM, 2)}
    return row


def _overrides(settings: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def _train(config: Path, *, processes: int, settings: Mapping[str, str]) -> Config:
    """A finished run of it; its configuration."""
    overrides = _overrides(settings)
    sets = [word for override in overrides for word in ("--set", override)]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
        "-m",
        "pyops",
        "train",
        str(config),
        *sets,
    ]
    path = os.pathsep.join([str(report.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with "
            f"{done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return load_config(config, overrides=overrides)


def _pretrained(name: str) -> Path:
    """The folder of the run to begin with, which is trained where it is not there, or another one
    than the example's is."""
    example, settings = (
        report.ROOT / "examples" / f"{name}_pretrain.toml",
        {"train.folder": str(FOLDER)},
    )
    folder = FOLDER / f"{name}_pretrain"
    if not _finished(folder, load_config(example, overrides=_overrides(settings))):
        print(f"training {folder.name} first", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        _train(example, processes=2, settings=settings)
    return folder


def _finished(folder: Path, config: Config) -> bool:
    """Whether a run of this configuration has come to its end there, and left a checkpoint."""
    try:
        found = json.loads((folder / "config.json").read_text())
        last = read_rows(folder / "metrics.jsonl")[-1]
    except (OSError, ValueError, IndexError):
        return False
    ended = last["epoch"] + 1 == config.task.num_epochs and any(
        key.startswith("validation_") for key in last
    )
    same = _filled(found) == json.loads(json.dumps(asdict(config)))
    return ended and same and any((folder / "checkpoints").glob("*"))


def _filled(found: Row) -> Row:
    """A configuration that was saved, and the defaults of keys that have come since, which leave a
    run as it was."""
    defaults = json.loads(json.dumps(asdict(Config())))
    sections = {key: value for key, value in defaults.items() if isinstance(value, dict)}
    return {**found, **{key: {**value, **found.get(key, {})} for key, value in sections.items()}}


def _measured(workload: str, processes: int, variant: str, seed: int) -> Taken:
    name = CONFIGS[workload]
    settings = {
        "name": f"{name}_{processes}_{list(VARIANTS).index(variant)}_{seed}",
        "train.folder": str(FOLDER),
        "train.seed": str(seed),
        "parallel.pp": str(processes),
        "task.pretrained": str(_pretrained(name)),
        **VARIANTS[variant],
    }
    config = _train(
        report.ROOT / "examples" / f"{name}.toml", processes=processes, settings=settings
    )
    rows = read_rows(config.folder / "metrics.jsonl")
    samples = sum(config.train.batch for row in rows if row["epoch"] == 0)
    return taken(rows, batch=config.train.batch, samples=samples)


def _rows(workload: str, processes: int, variants: Sequence[str], *, rounds: int) -> Iterator[Row]:
    case = f"{workload}, {processes} processes"
    found: dict[str, list[Taken]] = {variant: [] for variant in variants}
    for seed in range(rounds):
        for variant in variants if seed % 2 == 0 else reversed(variants):
            one = _measured(workload, processes, variant, seed)
            found[variant].append(one)
            print(
                f"{case}, {variant}, seed {seed}: {one.seconds:.1f} s, accuracy "
                f"{one.accuracy:.2%}, "
                f"transitions {[round(each, 2) for each in one.transitions]}",
                flush=True,
            )
    stamp = {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    for variant in variants:
        row = {**row_of(case, variant, found), **stamp}
        print(
            harness.format_row(row),
            f"| accuracy {statistics.fmean(row['accuracy']):.2f} % ({row['points']:+.2f})",
            flush=True,
        )
        if variant in (BASELINE, ALL):
            for each in row["epochs"]:
                print("   ", each)
        yield row


def run(options: Any) -> list[Row]:
    """The rows of this bench. --only: part of a case's name, such as "digits, 4" or "digits, 4
    processes, + AutoCache", which is then timed beside the baseline alone."""
    if options.device.type != "cpu":
        print("the elastic bench runs on CPU processes only")
        return []
    rows: list[Row] = []
    for workload, processes in CASES:
        case = f"{workload}, {processes} processes"
        names = [
            name for name in VARIANTS if options.only is None or options.only in f"{case}, {name}"
        ]
        if names:
            chosen = list(dict.fromkeys([BASELINE, *names]))
            rows += _rows(workload, processes, chosen, rounds=min(options.rounds, SEEDS))
    return rows
