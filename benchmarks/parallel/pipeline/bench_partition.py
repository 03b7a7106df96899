"""Which layers go to which stage: the slowest stage of other partitioners over that of `balance`,
which is the least there is.

A case is a sort of costs, drawn 150 times; the same numbers for all. "vs" is the mean of the
ratios: how many times slower the slowest stage of a rival's partition is, and with it a pipeline
whose bubble is small. The time is that of one `balance`.

Rivals, those that are there: torchgpipe (pip install --no-deps torchgpipe): blockpartition.solve,
what balance_by_time calls with its measured times; DeepSpeed: partition_balanced.
"""

from __future__ import annotations

import importlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from typing import Any

import torch

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, quantiles
from pyops.pipeline import balance

__all__ = ["CASES", "rivals", "run"]

DRAWS = 150
Costs = list[float]
Partitioner = Callable[[Costs, int], list[int]]  # boundaries


def noisy(costs: Sequence[float], noise: float = 0.02) -> Callable[[random.Random], Costs]:
    return lambda draw: [cost * (1 + noise * (2 * draw.random() - 1)) for cost in costs]


CASES: tuple[tuple[str, int, Callable[[random.Random], Costs]], ...] = (
    ("24 identical layers measured to 2 %, 4 stages", 4, noisy([1.0] * 24)),
    ("24 identical layers measured to 2 %, 8 stages", 8, noisy([1.0] * 24)),
    (
        "24 layers of 1 to 100, 8 stages",
        8,
        lambda draw: [float(draw.randint(1, 100)) for _ in range(24)],
    ),
    (
        "24 layers, log-normal, 8 stages",
        8,
        lambda draw: [draw.lognormvariate(0, 1) for _ in range(24)],
    ),
    (
        "embedding, 12 times attention 1 and MLP 2, head 3; 8 stages",
        8,
        noisy([0.5, *([1.0, 2.0] * 12), 3.0]),
    ),
)  # fmt: skip


def rivals() -> dict[str, Partitioner]:
    """Those that can be imported."""
    found: dict[str, Partitioner] = {}
    try:
        solve = importlib.import_module("torchgpipe.balance.blockpartition").solve

        def torchgpipe(costs: Costs, stages: int) -> list[int]:
            return [
                0,
                *itertools.accumulate(len(block) for block in solve(costs, partitions=stages)),
            ]

        found["torchgpipe"] = torchgpipe
    except ImportError:
        pass
    try:
        solver = importlib.import_module("deepspeed.runtime.utils").partition_balanced

        def deepspeed(costs: Costs, stages: int) -> list[int]:
            return [int(bound) for bound in solver(costs, stages)]

        found["DeepSpeed"] = deepspeed
    except ImportError:
        pass
    return found


def slowest(costs: Costs, bounds: Sequence[int]) -> float:
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(bounds))


def _rows(options: Any) -> Iterator[Row]:
    others = rivals()
    for name, stages, make in CASES:
        if options.only is not None and options.only not in name:
            continue
        draw = random.Random(0)
        several = [make(draw) for _ in range(DRAWS)]
        seconds, ours = [], []
        for costs in several:
            start = time.perf_counter()
            bounds = balance(costs, num_stages=stages)
            seconds.append(time.perf_counter() - start)
            ours.append(slowest(costs, bounds))
        ratios: dict[str, list[float]] = {
            rival: [
                slowest(costs, solve(costs, stages)) / best
                for costs, best in zip(several, ours, strict=True)
            ]
            for rival, solve in others.items()
        }
        if any(ratio < 1 - 1e-9 for each in ratios.values() for ratio in each):
            raise AssertionError(
                f"{name}: a rival's slowest stage is faster than ours, which should be "
                "the fastest there is"
            )
        yield {
            "bench": "partition",
            "case": name,
            "device": "cpu",
            "us": {"pyops": quantiles(seconds)},
            "speedup": {rival: round(statistics.mean(each), 3) for rival, each in ratios.items()},
            "worst": {rival: round(max(each), 2) for rival, each in ratios.items()},
            "max_error": None,
            "rounds": DRAWS,
            "machine": machine.describe(torch.device("cpu")),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        }


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    found = []
    for row in _rows(options):
        against = ", ".join(
            f"{rival} {mean:.3f}x, worst {row['worst'][rival]:.2f}x"
            for rival, mean in row["speedup"].items()
        )
        print(f"{row['case']:<62} {against}", flush=True)
        found.append(row)
    return found
