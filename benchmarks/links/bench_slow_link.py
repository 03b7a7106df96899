"""All-reduces and training over a network that is really slow: namespaces, a rate limit, the
interface's own counters.

    all_reduce   100 MB of fp32 over 2 ranks: Gloo's own beside codecs
    step         a training step of the example GPT after the warm-up: torch DDP + AdamW beside
                 compressed ways; batch 8, and batch 2, where computation is a smaller part of it
    loss         250 steps of it at 100 Mbit/s, a fifth of them warm-up: loss against seconds, drawn
                 in docs/slow_link.png for batch 8

`--only` takes a part of a case's name: "all_reduce", "100 Mbit/s", "OneBitAdam", "loss". Needs
root: says so and skips else.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import torch

import pyops.optim
from benchmarks.instruments import machine, report
from benchmarks.instruments.harness import Row, format_row, quantiles
from benchmarks.links.slow_link import Link, available
from benchmarks.links.slow_link_ranks import ALONE, BASELINE, FP32, WAYS

__all__ = ["run"]

NUMEL = 25_000_000
BATCH = 8
STEPS = (
    (2, 100, 8),
    (2, 1000, 8),
    (2, 10_000, 8),
    (2, 100, 2),
    (2, 1000, 2),
    (4, 100, 8),
    (4, 1000, 8),
)  # ranks, Mbit/s, batch
WARMUP, LOSS_STEPS = 50, 250
LOSS_WAYS = {2: (BASELINE, "OneBitAdam", "ZeroOneAdam")}  # of a batch; of others all
CODECS = ("bf16", "int8", "onebit")
SPEEDS = (100, 1000, 10_000)
# (Mbit/s, way) -> how many times faster than the first it ought to be.
ALL_REDUCE_TARGETS = {
    (100, "onebit"): 25.0,
    (100, "int8"): 3.7,
    (1000, "onebit"): 15.0,
    (1000, "int8"): 3.3,
}
STEP_TARGETS = {(100, "OneBitAdam"): 10.0, (1000, "OneBitAdam"): 3.0}
LOSS_TARGETS = {(100, "OneBitAdam"): 3.3}
WIRE_TARGETS = {
    "onebit": 30.0,
    "int8": 3.8,
    "OneBitAdam": 30.0,
    "OneBitLAMB": 30.0,
    "ZeroOneAdam": 60.0,
    "AdamW, int8": 3.8,
}


def _speed(mbit: int) -> str:
    return f"{mbit} Mbit/s" if mbit < 1000 else f"{mbit // 1000} Gbit/s"


def _row(
    name: str,
    way: str,
    found: Mapping[str, Any],
    *,
    rival: str,
    ranks: int,
    mbit: int,
    target: float | None,
) -> Row:
    """A row in the harness's format: `way` beside `rival`. found: {name: {"seconds", "sent"}}, of
    the slowest rank."""
    seconds = {key: found[key]["seconds"] for key in (way, rival)}
    us = {key: quantiles(values) for key, values in seconds.items()}
    sent = {key: round(statistics.fmean(found[key]["sent"])) for key in (way, rival)}
    middle = {key: statistics.median(values) for key, values in seconds.items()}
    row: Row = {
        "bench": "slow_link",
        "case": name,
        "device": "cpu",
        "us": us,
        "speedup": {rival: round(middle[rival] / middle[way], 3)} if way != rival else {},
        "max_error": None,
        "rounds": len(seconds[way]),
        "ranks": ranks,
        "mbit": mbit,
        "wire_bytes": sent[way],
    }
    if way == rival:
        row["us"] = {way: us[way]}
    elif sent[way]:
        row["wire_ratio"] = round(sent[rival] / sent[way], 2)
        if way in WIRE_TARGETS:
            row["wire_target"] = WIRE_TARGETS[way]
    if target is not None:
        row["targets"] = {rival: target}
    return row | _stamp()


def _stamp() -> Row:
    return {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _slowest(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each sample, the time and the bytes of the rank that took longest, or sent most."""
    return {
        name: {
            key: [max(values) for values in zip(*(r[name][key] for r in results), strict=True)]
            for key in results[0][name]
        }
        for name in results[0]
    }


def _all_reduces(options: Any, *, mbit: int) -> Iterator[Row]:
    name = f"all_reduce 100 MB, 2 ranks, {_speed(mbit)}"
    chosen = [codec for codec in CODECS if _wanted(options, f"{name}, {codec}")]
    if not chosen:
        return
    rounds = min(options.rounds, {100: 3, 1000: 5}.get(mbit, 9))
    with Link(ranks=2, mbit=mbit) as link:
        arguments = {"numel": NUMEL, "names": [FP32, *chosen], "rounds": rounds}
        found = _slowest(
            link.run("benchmarks.links.slow_link_ranks:all_reduces", arguments, timeout=600)
        )
    for way in (FP32, *chosen):
        target = ALL_REDUCE_TARGETS.get((mbit, way))
        yield _row(f"{name}, {way}", way, found, rival=FP32, ranks=2, mbit=mbit, target=target)


def _steps(options: Any, *, ranks: int, mbit: int, batch: int) -> Iterator[Row]:
    name = f"GPT step, {ranks} ranks, {_speed(mbit)}, batch {batch}"
    chosen = [
        way for way in (*_ways(), ALONE) if way != BASELINE and _wanted(options, f"{name}, {way}")
    ]
    if not chosen:
        return
    rounds = min(options.rounds, {100: 9, 1000: 15}.get(mbit, 15))
    counts = dict.fromkeys((BASELINE, *chosen), rounds)
    with Link(ranks=ranks, mbit=mbit) as link:
        arguments = {"ways": counts, "batch": batch, "warmup": 2}
        found = _slowest(link.run("benchmarks.links.slow_link_ranks:steps", arguments, timeout=900))
    for way in (BASELINE, *chosen):
        target = STEP_TARGETS.get((mbit, way)) if ranks == 2 else None
        yield _row(
            f"{name}, {way}", way, found, rival=BASELINE, ranks=ranks, mbit=mbit, target=target
        )


def _losses(options: Any, *, mbit: int, batch: int) -> Iterator[Row]:
    name = f"loss, 2 ranks, {_speed(mbit)}, batch {batch}, {LOSS_STEPS} steps"
    chosen = [way for way in LOSS_WAYS.get(batch, _ways()) if _wanted(options, f"{name}, {way}")]
    baseline: Mapping[str, Any] | None = (
        _known_baseline(f"{name}, {BASELINE}") if BASELINE not in chosen else None
    )
    for way in chosen:
        with Link(ranks=2, mbit=mbit) as link:
            arguments = {"way": way, "batch": batch, "num_steps": LOSS_STEPS, "warmup": WARMUP}
            first, *_ = link.run("benchmarks.links.slow_link_ranks:losses", arguments, timeout=1200)
        taken = {"seconds": [first["seconds"][-1]], "sent": [first["sent"]]}
        baseline = taken if way == BASELINE else baseline
        found = {way: taken, BASELINE: baseline or taken}
        row = _row(
            f"{name}, {way}",
            way,
            found,
            rival=BASELINE if baseline else way,
            ranks=2,
            mbit=mbit,
            target=LOSS_TARGETS.get((mbit, way)),
        )
        row.pop("wire_target", None)  # of the compressed phase alone
        row["batch"], row["validation_loss"] = batch, round(first["validation_loss"], 4)
        row["curve"] = [
            [round(s, 3), round(v, 4)] for s, v in zip(first["seconds"], first["loss"], strict=True)
        ]
        yield row


def _known_baseline(case: str) -> Mapping[str, Any] | None:
    """What an earlier call measured: these runs take minutes, and one way may be run again
    alone."""
    here = machine.slug(_stamp()["machine"])
    for row in report.newest(report.read_rows()):
        if (row["bench"], row["case"], machine.slug(row["machine"])) == ("slow_link", case, here):
            return {"seconds": [row["us"][BASELINE][1] / 1e6], "sent": [row["wire_bytes"]]}
    return None


def _ways() -> list[str]:
    """Those of WAYS that this installation has an optimizer for."""
    return [
        way
        for way in WAYS
        if not way.startswith(("OneBit", "ZeroOne")) or hasattr(pyops.optim, way)
    ]


def _wanted(options: Any, case: str) -> bool:
    return options.only is None or options.only in case


def _rows(options: Any) -> Iterator[Row]:
    for mbit in SPEEDS:
        yield from _all_reduces(options, mbit=mbit)
    for ranks, mbit, batch in STEPS:
        yield from _steps(options, ranks=ranks, mbit=mbit, batch=batch)
    for batch in (BATCH, 2):
        yield from _losses(options, mbit=100, batch=batch)


def run(options: Any) -> list[Row]:
    """The rows of this bench; none, with the reason, where no link can be made."""
    if (reason := available()) is not None:
        print(f"no slow link here: {reason}")
        return []
    found = []
    for row in _rows(options):
        wire = f", {row['wire_ratio']:.1f}x fewer bytes" if "wire_ratio" in row else ""
        print(f"{format_row(row)} | {row['wire_bytes'] / 1e6:.3f} MB on the wire{wire}", flush=True)
        found.append(row)
    return found
