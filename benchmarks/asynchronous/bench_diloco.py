"""Few meetings over a slow link: seconds, bytes and loss of a short run of the example
GPT on 2 ranks at 100 Mbit/s, beside torch DDP + AdamW.

    loss     250 steps: local SGD every 8 and 16 steps, DiLoCo every 25 and 50, as fp32, int8, int4
             and one bit; the loss held out is of the global values
    long     2000 steps, local SGD every 8 and DiLoCo every 50, over a fast link, from the beginning
             and after 500 steps that end with a mean each: rows of losses, without times
    virtual  64 replicas in virtual time, of which each step takes a time of its own: what part of
             the time they compute, by the steps between two meetings

`--only` takes a part of a case's name. The link needs root: the bench says so and skips else.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.asynchronous.diloco_ranks import BASELINE, WAYS
from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, format_row
from benchmarks.links.slow_link import Link, available
from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import Link as VirtualLink
from pyops.local_sgd.virtual_time import VirtualReplica, run_replicas

__all__ = ["run"]

BATCH, RANKS = 8, 2
SHORT, LONG = (250, 100), (2000, 10_000)  # steps, and Mbit/s of the link
CURVE = 250  # points of it at most
LONG_WAYS = (
    "local SGD, every 8",
    "local SGD, every 8, states averaged",
    "local SGD, every 8, states averaged, learning rate x sqrt 2",
    "DiLoCo, every 50",
    "DiLoCo, every 50, outer momentum 0.7",
    "DiLoCo, every 50, outer momentum 0.5",
    "local SGD, every 8 after 500 steps, states averaged",
    "DiLoCo, every 50 after 500 steps, outer momentum 0.5",
)
LONG_ALONE = {*LONG_WAYS} - {"local SGD, every 8", "DiLoCo, every 50"}
SHORT_WAYS = tuple(way for way in WAYS if way not in LONG_ALONE)
LIMITS = {"local SGD": 1.01, "DiLoCo": 1.015}  # the loss held out, as a part of the baseline's
REPLICAS, SPREAD, VIRTUAL_STEPS = 64, 0.5, 64
PARAMETERS, SECONDS = 4096, 0.25  # of a virtual replica's model; of its step
BYTES_PER_SECOND = 1.25e5  # so that a meeting takes as long as a step


def _stamp() -> Row:
    return {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _measured(way: str, *, steps: int, mbit: int) -> Mapping[str, Any]:
    with Link(ranks=RANKS, mbit=mbit) as link:
        arguments = {"way": way, "batch": BATCH, "num_steps": steps}
        function = "benchmarks.asynchronous.diloco_ranks:losses"
        first, *_ = link.run(function, arguments, timeout=5.0 * steps)
    found: Mapping[str, Any] = first
    return found


def _losses(options: Any, ways: Iterable[str], *, steps: int, mbit: int) -> Iterator[Row]:
    name = f"loss, {RANKS} ranks, {mbit} Mbit/s, batch {BATCH}, {steps} steps"
    chosen = [way for way in ways if options.only is None or options.only in f"{name}, {way}"]
    if not chosen:
        return
    measured = partial(_measured, steps=steps, mbit=mbit)
    baseline = measured(BASELINE)
    for way in (BASELINE, *(way for way in chosen if way != BASELINE)):
        found = baseline if way == BASELINE else measured(way)
        us = {
            key: _thrice(each["seconds"][-1])
            for key, each in ((way, found), (BASELINE, baseline))
            if (steps, mbit) == SHORT
        }
        aims = LIMITS if (steps, mbit) == LONG else {}
        limit = next((aims[key] for key in aims if way.startswith(key)), None)
        ratio = found["validation_loss"] / baseline["validation_loss"]
        yield {
            "bench": "diloco",
            "case": f"{name}, {way}",
            "device": "cpu",
            "us": us,
            "speedup": {}
            if way == BASELINE or not us
            else {BASELINE: round(us[BASELINE][1] / us[way][1], 3)},
            "max_error": None,
            "rounds": 1,
            "ranks": RANKS,
            "mbit": mbit,
            "batch": BATCH,
            "wire_bytes": found["sent"],
            "wire_ratio": round(baseline["sent"] / found["sent"], 2),
            "validation_loss": round(found["validation_loss"], 4),
            "loss_ratio": round(ratio, 4),
            "loss_limit": limit,
            "curve": [
                [round(found["seconds"][i], 3), round(found["loss"][i], 4)]
                for i in range(0, steps, steps // CURVE)
            ],
        } | _stamp()


def _thrice(seconds: float) -> list[float]:
    """The form of a row's quantiles, of one sample."""
    return [seconds * 1e6] * 3


def _replica(me: VirtualReplica, *, every: int) -> tuple[float, float, float]:
    model = nn.Linear(PARAMETERS, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = LocalSGDConfig(method="local_sgd", every=every)
    outer = LocalSGD(model, optimizer, config, group=me.exchange)
    spread = random.Random(me.number)
    for _ in range(VIRTUAL_STEPS):
        me.compute(SECONDS * (1 + SPREAD * spread.random()))
        outer.step()
    return me.clock, me.computed, me.bytes_sent


def _virtual(options: Any) -> Iterator[Row]:
    link = VirtualLink(bytes_per_second=BYTES_PER_SECOND, latency=0.01)
    for every in (1, 4, 16, 64):
        name = f"virtual, {REPLICAS} replicas, {VIRTUAL_STEPS} steps, a meeting every {every}"
        if options.only is not None and options.only not in name:
            continue
        found = run_replicas(REPLICAS, partial(_replica, every=every), link=link)
        rows = [each for each in found if each is not None]
        clock = max(row[0] for row in rows)
        yield {
            "bench": "diloco",
            "case": name,
            "device": "cpu",
            "us": {"pyops": _thrice(clock)},
            "speedup": {},
            "max_error": None,
            "rounds": 1,
            "ranks": REPLICAS,
            "virtual": True,
            "computing": round(sum(row[1] for row in rows) / (clock * REPLICAS), 4),
            "wire_bytes": round(rows[0][2]),
        } | _stamp()


def run(options: Any) -> list[Row]:
    """The rows of this bench; those of the link only where one can be made."""
    found = []
    reason = available()
    if reason is not None:
        print(f"no slow link here: {reason}")
    runs = [
        _losses(options, ways, steps=steps, mbit=mbit)
        for ways, (steps, mbit) in ((SHORT_WAYS, SHORT), (LONG_WAYS, LONG))
    ]
    for part in (_virtual(options), *([] if reason else runs)):
        for row in part:
            loss = f", loss {row['validation_loss']}" if "validation_loss" in row else ""
            print(f"{format_row(row)} | {row['wire_bytes'] / 1e6:.3f} MB{loss}", flush=True)
            found.append(row)
    return found
