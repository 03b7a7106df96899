"""Attention over ranks that a limited network joins, by each method, beside what the cost model
says: forward and backward of causal attention, fp32, one thread a rank.

The model is told the rate of the link, the latency of a short exchange, and how long a rank
computes, both as they are measured in the same run. `same_order` is whether the methods come in the
order that it says; methods that it takes for equal, within a twentieth, may come in either.

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
from pyops.context_parallel import AttentionShape, context_cost

__all__ = ["agree", "predicted", "run"]

HEADS, WIDTH = 8, 64
PAYLOAD = 0.95  # of a link's bits, in frames of 1500 bytes
EQUAL = 0.05
# ranks, Mbit/s, heads of keys, tokens
CASES = (
    (2, 100, 8, 4096),
    (2, 1000, 8, 4096),
    (2, 100, 2, 4096),
    (2, 1000, 2, 4096),
    (4, 100, 8, 4096),
    (4, 1000, 8, 4096),
    (4, 100, 2, 4096),
    (4, 1000, 2, 4096),
)


def predicted(
    ranks: int, mbit: int, kv_heads: int, length: int, *, found: dict[str, Any]
) -> dict[str, float]:
    """Seconds of each method, by the cost model.

    Args:
        ranks, mbit, kv_heads, length: Of the case.
        found: "compute", seconds forward and backward; "latency"; and the methods.
    """
    shape = AttentionShape(length, HEADS, WIDTH, num_kv_heads=kv_heads, dtype=torch.float32)
    return {
        method: context_cost(shape, ranks=ranks, method=method).seconds(
            bandwidth=PAYLOAD * mbit * 1e6 / 8,
            latency=found["latency"],
            compute=found["compute"],
        )
        for method in found["methods"]
    }


def agree(measured: dict[str, float], expected: dict[str, float]) -> bool:
    """Whether no two methods come in another order than expected."""
    return all(
        measured[a] <= measured[b]
        for a in expected
        for b in expected
        if expected[a] < (1 - EQUAL) * expected[b]
    )


def _slowest(of_ranks: list[list[float]]) -> list[float]:
    """Of each round, the time of the rank that took longest."""
    return [max(values) for values in zip(*of_ranks, strict=True)]


def _row(ranks: int, mbit: int, kv_heads: int, length: int, results: list[dict[str, Any]]) -> Row:
    methods = [name for name in results[0] if name not in ("compute", "latency")]
    seconds = {method: _slowest([r[method]["seconds"] for r in results]) for method in methods}
    compute = [
        statistics.median(_slowest([[each[i] for each in r["compute"]] for r in results]))
        for i in (0, 1)
    ]
    latency = max(r["latency"] for r in results)
    found = {"methods": methods, "compute": tuple(compute), "latency": latency}
    expected = predicted(ranks, mbit, kv_heads, length, found=found)
    middle = {method: statistics.median(seconds[method]) for method in methods}
    order = sorted(methods, key=lambda method: middle[method])
    speed = f"{mbit} Mbit/s" if mbit < 1000 else f"{mbit // 1000} Gbit/s"
    return {
        "bench": "context_link",
        "case": f"attention, cp = {ranks}, {speed}, {length} tokens, {kv_heads} of {HEADS} heads "
        "of keys",
        "device": "cpu",
        "us": {method: quantiles(seconds[method]) for method in order},
        "speedup": {},
        "max_error": None,
        "rounds": len(seconds[methods[0]]),
        "ranks": ranks,
        "mbit": mbit,
        "tokens": length,
        "predicted_seconds": {method: round(expected[method], 4) for method in methods},
        "compute_seconds": [round(each, 4) for each in compute],
        "latency_seconds": round(latency, 6),
        "received_bytes": {
            method: max(r[method]["received_bytes"] for r in results) for method in methods
        },
        "sent_bytes": {
            method: round(max(statistics.fmean(r[method]["sent"]) for r in results))
            for method in methods
        },
        "order": order,
        "predicted_order": sorted(methods, key=lambda method: expected[method]),
        "same_order": agree(middle, expected),
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    if (reason := available()) is not None:
        print(f"context_link is left out: {reason}")
        return []
    rows = []
    for ranks, mbit, kv_heads, length in CASES:
        name = f"cp = {ranks}, {mbit} Mbit/s, {kv_heads} heads of keys"
        if options.only is not None and options.only not in name:
            continue
        arguments = {
            "length": length,
            "num_heads": HEADS,
            "num_kv_heads": kv_heads,
            "head_dim": WIDTH,
            "rounds": min(options.rounds, 5),
        }
        with Link(ranks=ranks, mbit=mbit) as link:
            results = link.run(
                "benchmarks.parallel.context.context_link_ranks:attention_passes",
                arguments,
                timeout=600,
            )
        row = _row(ranks, mbit, kv_heads, length, results)
        times = ", ".join(
            f"{method} {row['us'][method][1] / 1e6:.3f} s ({row['predicted_seconds'][method]:.3f})"
            for method in row["order"]
        )
        print(f"{row['case']}: {times}; same order: {row['same_order']}", flush=True)
        rows.append(row)
    return rows
