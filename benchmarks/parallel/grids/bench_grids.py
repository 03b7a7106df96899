"""A layer's four products over ranks that a limited network joins, in one dimension and on a grid
of 2 x 2, beside what the cost functions say: forward and backward, fp32, one thread a rank.

The functions are told the rate of the link, the latency of a short exchange, and how long a rank
computes, as they are measured in the same run. `same_order` is whether the ways come in the order
that they say; ways that they take for equal, within a twentieth, may come in either. In the shape
with few tokens one dimension is named, in that with many the grid.

Needs root: says so and skips else.
"""

from __future__ import annotations

import statistics
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, quantiles
from benchmarks.links.slow_link import Link, available
from benchmarks.parallel.context.bench_context_link import PAYLOAD, agree
from benchmarks.parallel.grids.grids_ranks import METHODS
from pyops.tensor_parallel.grids.costs import FEWEST, LayerCost, cost_1d, cost_grid

__all__ = ["costs", "predicted", "run"]

PASSES = "benchmarks.parallel.grids.grids_ranks:layer_passes"
RANKS, ELEMENT = 4, 4
CASES = ((100, 256, 128), (100, 256, 4096))  # Mbit/s, width, tokens


def costs(tokens: int, width: int) -> dict[str, LayerCost]:
    """What each way costs a rank.

    Args:
        tokens: Rows of x, of all ranks.
        width: Of the model.
    """
    one, published, few = METHODS
    return {
        one: cost_1d(tokens, width, ranks=RANKS, sequence_parallel=False),
        published: cost_grid(tokens, width, ranks=RANKS, mode="2d"),
        few: cost_grid(tokens, width, ranks=RANKS, mode="2d", forms=FEWEST),
    }


def predicted(
    tokens: int, width: int, *, mbit: int, compute: float, latency: float
) -> dict[str, float]:
    """Seconds of forward and backward of each way.

    Args:
        tokens: Rows of x, of all ranks.
        width: Of the model.
        mbit: Mbit/s of a rank's link.
        compute: Seconds that a rank computes.
        latency: Seconds of a short exchange.
    """
    bandwidth, found = PAYLOAD * mbit * 1e6 / 8, {}
    for name, cost in costs(tokens, width).items():
        collectives = cost.collectives * cost.step / cost.forward
        found[name] = compute + ELEMENT * cost.step / bandwidth + collectives * latency
    return found


def _slowest(of_ranks: list[list[float]]) -> list[float]:
    """Of each round, the time of the rank that took longest."""
    return [max(values) for values in zip(*of_ranks, strict=True)]


def _row(mbit: int, width: int, tokens: int, results: list[dict[str, Any]]) -> Row:
    seconds = {m: _slowest([r[m]["seconds"] for r in results]) for m in METHODS}
    middle = {m: statistics.median(seconds[m]) for m in METHODS}
    compute = statistics.median(_slowest([r["compute"] for r in results]))
    latency = max(r["latency"] for r in results)
    expected = predicted(tokens, width, mbit=mbit, compute=compute, latency=latency)
    order = sorted(METHODS, key=lambda method: middle[method])
    return {
        "bench": "grids",
        "case": f"link, a layer of width {width}, {tokens} tokens, {RANKS} ranks, {mbit} Mbit/s",
        "device": "cpu",
        "us": {method: quantiles(seconds[method]) for method in order},
        "speedup": {},
        "max_error": None,
        "rounds": len(seconds[METHODS[0]]),
        "ranks": RANKS,
        "mbit": mbit,
        "predicted_seconds": {method: round(expected[method], 4) for method in METHODS},
        "compute_seconds": round(compute, 4),
        "latency_seconds": round(latency, 6),
        "formula_bytes": {m: round(ELEMENT * c.step) for m, c in costs(tokens, width).items()},
        "counted_bytes": {m: max(r[m]["received_bytes"] for r in results) for m in METHODS[1:]},
        "sent_bytes": {
            m: round(max(statistics.fmean(r[m]["sent"]) for r in results)) for m in METHODS
        },
        "order": order,
        "predicted_order": sorted(METHODS, key=lambda method: expected[method]),
        "same_order": agree(middle, expected),
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    if (reason := available()) is not None:
        print(f"grids is left out: {reason}")
        return []
    rows = []
    for mbit, width, tokens in CASES:
        if options.only is not None and options.only not in f"link, {tokens} tokens":
            continue
        arguments = {"tokens": tokens, "width": width, "rounds": min(options.rounds, 7)}
        with Link(ranks=RANKS, mbit=mbit) as link:
            results = link.run(PASSES, arguments, timeout=600)
        row = _row(mbit, width, tokens, results)
        times = ", ".join(
            f"{method} {row['us'][method][1] / 1e6:.3f} s ({row['predicted_seconds'][method]:.3f})"
            for method in row["order"]
        )
        print(f"{row['case']}: {times}; same order: {row['same_order']}", flush=True)
        rows.append(row)
    return rows
