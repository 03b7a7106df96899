"""DistBelief's findings on scikit-learn's digits, in virtual time: the held-out accuracy after
1,800 pushes with 1, 8 and 32 replicas, and what Sandblaster L-BFGS makes of the same seconds.

    SGD, rate 0.3            falls with the number of replicas
    Adagrad, rate 0.005      does not, with a warm start of 100 pushes least of all
    Sandblaster L-BFGS       few passes over the batch for each iteration, slow worker or not

`--rounds N`: as many seeds, 5 at most. Seconds are those of a computed clock, so that no other
program on the machine has a part in them. The rows of the first seed become docs/distbelief.png.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.asynchronous.distbelief_digits import Downpour, Found, Sandblaster
from benchmarks.asynchronous.distbelief_picture import PICTURE, draw
from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row

__all__ = ["REACHED", "WAYS", "run"]

SEEDS = 5
REACHED = 0.96  # of the held-out images: the seconds until then are in the row
WAYS: Mapping[str, Mapping[str, Any]] = {
    "SGD": {"rule": "SGD", "rate": 0.3},
    "Adagrad": {"rule": "Adagrad", "rate": 0.005},
    "Adagrad, warm start": {"rule": "Adagrad", "rate": 0.005, "warm_start": 100},
}
REPLICAS = (1, 8, 32)
BATCH_WAYS: Mapping[str, Mapping[str, Any]] = {
    "Sandblaster": {},
    "Sandblaster, one 50 times slower": {"slow": 50.0},
}
AIMS: dict[str, Row] = {
    "SGD, 1 replica": {"least": {"percent": 96.5}},
    "SGD, 32 replicas": {"most": {"percent": 50.0}},
    "Adagrad, warm start, 32 replicas": {"least": {"percent": 96.0}},
}


def _runs() -> Iterator[tuple[str, type, Mapping[str, Any]]]:
    """(way, what runs it, its options) of each case."""
    for way, options in WAYS.items():
        for replicas in REPLICAS:
            if replicas > 1 or "warm_start" not in options:
                yield way, Downpour, {**options, "replicas": replicas}
    for way, options in BATCH_WAYS.items():
        yield way, Sandblaster, {**options, "replicas": REPLICAS[-1]}


def _row(case: str, way: str, replicas: int, found: list[Found]) -> Row:
    row: Row = {
        "bench": "distbelief",
        "case": case,
        "way": way,
        "replicas": replicas,
        "device": "cpu",
        "us": {},
        "speedup": {},
        "max_error": None,
        "rounds": len(found),
        "virtual": True,
        "accuracy": [round(100 * each.accuracy, 2) for each in found],
        "percent": round(statistics.fmean(100 * each.accuracy for each in found), 2),
        "virtual_s": round(statistics.fmean(each.curve[-1][0] for each in found), 1),
        "curve": [[at, round(100 * reached, 2)] for at, reached in found[0].curve],
    }
    reached = [each.seconds_to(REACHED) for each in found]
    row["reached_s"] = [None if at is None else round(at, 1) for at in reached]
    if found[0].evaluations:
        row["passes_an_iteration"] = round(statistics.fmean(each.evaluations for each in found), 3)
    else:
        row["mean_staleness"] = round(statistics.fmean(each.staleness for each in found), 2)
    return row | AIMS.get(case, {})


def _stamp() -> Row:
    return {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: Any) -> list[Row]:
    """The rows of this bench; draws docs/distbelief.png where all cases are run."""
    torch.set_num_threads(1)
    rows = []
    for way, kind, given in _runs():
        replicas = given["replicas"]
        case = f"{way}, {replicas} replica{'s' if replicas > 1 else ''}"
        if options.only is not None and options.only not in case:
            continue
        found = [kind(**given, seed=seed).run() for seed in range(min(options.rounds, SEEDS))]
        rows.append(_row(case, way, replicas, found) | _stamp())
        seconds = [at for at in rows[-1]["reached_s"] if at is not None]
        print(
            f"{case:<50} {rows[-1]['percent']:6.2f} % after {rows[-1]['virtual_s']:7.1f} virtual s"
            + (f", {REACHED:.0%} after {statistics.median(seconds):.1f}" if seconds else ""),
            flush=True,
        )
    if options.only is None:
        draw(rows, PICTURE)
    return rows
