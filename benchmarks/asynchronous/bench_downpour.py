"""Training without a barrier beside synchronous training: loss over time in virtual time, and what
Downpour SGD takes between real processes.

    virtual    four workers alike, one of them 5 times slower, and links of 100 Mbit/s: what part of
               the workers' steps reaches the parameters, and the held-out loss, drawn in
               docs/downpour.png
    processes  the same part with steps that sleep; a push and a fetch of 6 Mi numbers beside torch
               RPC; how long a killed replica holds up one that waits for it
    link       two replicas push and fetch 4 Mi numbers over links of 100 Mbit/s, as fp32 and int8

`--only` takes a part of a case's name. The link needs root: the bench says so and skips else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from benchmarks.asynchronous.downpour_picture import PICTURE, draw
from benchmarks.asynchronous.downpour_processes import exchanges, killed, uneven
from benchmarks.asynchronous.without_barrier import SITUATIONS, WAYS, WORKERS
from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, quantiles
from benchmarks.links.slow_link import Link, available

__all__ = ["run"]

NUMEL, LINK_NUMEL, LINK_STEPS, MBIT = 6 << 20, 4 << 20, 8, 100
REACHED = 0.15  # the held-out loss: the seconds until then are in the row
SLOW = "one 5x slower"
AIMS: Mapping[str, Row] = {
    f"{SLOW}, Downpour": {"least": {"part_of_all_steps": 0.8}},
    f"{SLOW}, processes": {"least": {"part_of_all_steps": 0.8}},
    "a killed replica": {"most": {"held_up_s": 0.2}},
}


def _stamp() -> Row:
    return {
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def _row(case: str, **found: Any) -> Row:
    common = {"bench": "downpour", "case": case, "device": "cpu", "us": {}, "speedup": {}}
    return common | {"max_error": None, "rounds": 1} | found | AIMS.get(case, {})


def _virtual(case: str, situation: str, way: str) -> Row:
    given = SITUATIONS[situation]
    course = WAYS[way](given)
    lasts = course.curve[-1][0]
    return _row(
        case,
        situation=situation,
        way=way,
        virtual=True,
        replicas=WORKERS,
        part_of_all_steps=round(course.steps / lasts / given.steps_per_second, 3),
        loss=round(course.curve[-1][1], 4),
        virtual_s=lasts,
        loss_reached_s=course.seconds_to(REACHED),
        curve=[[at, round(loss, 4)] for at, loss in course.curve],
    )


def _uneven(case: str, rounds: int) -> Row:
    parts = sorted(uneven((0.05, 0.05, 0.05, 0.25), lasts=4.0) for _ in range(min(rounds, 5)))
    return _row(
        case,
        replicas=WORKERS,
        rounds=len(parts),
        part_of_all_steps=round(parts[len(parts) // 2], 3),
        spread=[round(parts[0], 3), round(parts[-1], 3)],
    )


def _exchange(case: str, rounds: int) -> Row:
    found = exchanges(NUMEL, rounds=rounds)
    us = {name: quantiles(seconds) for name, seconds in found.items()}
    rival = "torch RPC"
    ratios = sorted(b / a for a, b in zip(found["pyops"], found[rival], strict=True))
    return _row(
        case,
        us=us,
        rounds=rounds,
        speedup={rival: round(us[rival][1] / us["pyops"][1], 3)},
        speedup_spread={
            rival: [round(ratios[len(ratios) // 5], 3), round(ratios[-1 - len(ratios) // 5], 3)]
        },
        targets={rival: 2.5},
        most={"ms": 15.0},
    )


def _killed(case: str, rounds: int) -> Row:
    found = sorted(killed() for _ in range(min(rounds, 5)))
    return _row(
        case,
        rounds=len(found),
        held_up_s=round(found[len(found) // 2], 3),
        spread=[round(found[0], 3), round(found[-1], 3)],
    )


def _over_link(case: str, rounds: int) -> Row:
    seconds: dict[str, list[float]] = {"int8": [], "fp32": []}
    with Link(ranks=3, mbit=MBIT) as link:
        for _ in range(min(rounds, 2)):
            for name, found in seconds.items():
                given = {"numel": LINK_NUMEL, "codec": name == "int8", "steps": LINK_STEPS}
                target = "benchmarks.asynchronous.downpour_processes:over_link"
                found.append(max(link.run(target, given, timeout=200)))
    us = {name: quantiles(found) for name, found in seconds.items()}
    return _row(
        case,
        us=us,
        rounds=len(seconds["int8"]),
        mbit=MBIT,
        replicas=2,
        speedup={"fp32": round(us["fp32"][1] / us["int8"][1], 3)},
        targets={"fp32": 3.5},
    )


def _cases() -> Iterator[tuple[str, Callable[[str, int], Row]]]:
    for situation in SITUATIONS:
        for way in WAYS:
            yield (
                f"{situation}, {way}",
                lambda case, _, given=(situation, way): _virtual(case, *given),  # type: ignore[misc]
            )
    yield f"{SLOW}, processes", _uneven
    yield "push and fetch of 6 Mi fp32, one replica", _exchange
    yield "a killed replica", _killed
    yield "2 replicas, 4 Mi, 100 Mbit/s, int8", _over_link


def _shown(row: Row) -> str:
    """One line for a terminal."""
    told = {
        "part_of_all_steps": "{:.1%} of all steps",
        "loss": "loss {:.3f}",
        "held_up_s": "held up {:.3f} s",
    }
    parts = [text.format(row[key]) for key, text in told.items() if key in row]
    parts += [f"{name} {values[1] / 1e3:.1f} ms" for name, values in row["us"].items()]
    return f"{row['case']:<44} " + ", ".join(parts)


def run(options: Any) -> list[Row]:
    """The rows of this bench; draws docs/downpour.png where all cases are run."""
    torch.set_num_threads(1)
    rows = []
    for case, measured in _cases():
        if options.only is not None and options.only not in case:
            continue
        reason = available() if measured is _over_link else None
        if reason is not None:
            print(f"no slow link here: {reason}")
            continue
        rows.append(partial(measured, case)(options.rounds) | _stamp())
        print(_shown(rows[-1]), flush=True)
    if options.only is None:
        draw(rows, PICTURE)
    return rows
