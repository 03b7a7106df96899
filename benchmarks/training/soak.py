"""Kills at random instants: python -m benchmarks.training.soak [--runs 100] [--seed 0] [--only
NAME] [--folder KEPT]

    a run      some ranks train; one of them is killed by SIGKILL: while they start, in a step, in a
               save, in a change of layout
    bare       the others must end with an error that names the killed rank, in time; all start
               again and go on
    torchrun   starts all of them again by itself
    verdict    "resumed": the losses of the whole run are those of one that nobody killed, bit for
               bit, and no half-written checkpoint is left; anything else is a FAIL, whose folder is
               kept

Each run is small: 24 steps of a GPT, or 16 of a ViT that is frozen layer by layer. Layouts: see
soak_layouts.LAYOUTS. A row of JSON for each run stands in KEPT/soak.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from benchmarks.training.soak_layouts import LAYOUTS, Place
from benchmarks.training.soak_processes import Forked, Process, end, wait_for

__all__ = ["Moment", "Result", "main"]

MOMENTS = ("start", "step", "step", "save", "save", "change")


@dataclass(frozen=True)
class Moment:
    """When which rank is killed: `part` (of 0 to 1) of the way through `kind`; after this row of
    metrics, but for a start."""

    kind: str
    victim: int
    after: int
    part: float


@dataclass(frozen=True)
class Result:
    """What came of one run. seconds: from the kill until the last of the others had ended; None
    under torchrun."""

    run: int
    layout: str
    ranks: int
    how: str
    moment: Moment
    verdict: str = "resumed"
    seconds: float | None = None
    killed_at_row: int | None = None


class Failed(Exception):
    """What must not be."""


def bare(place: Place, attempt: str) -> tuple[list[Forked], Any]:
    """The ranks without torchrun, and the store that they meet in: it outlives every one of them,
    as an agent's does."""
    store = (
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if place.ranks > 1
        else None
    )
    started = []
    for rank in range(place.ranks):
        variables = (
            {}
            if store is None
            else {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(place.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
            }
        )
        started.append(place.fork(f"{attempt}-rank-{rank}", **variables))
    return started, store


@dataclass(frozen=True)
class Reference:
    """A run that nobody killed: its losses, seconds until its first row of metrics, and seconds of
    a row."""

    losses: list[float]
    to_first: float
    of_row: float


def reference(place: Place, limit: float) -> Reference:
    begin = time.monotonic()
    processes, _store = bare(place, "straight")
    wait_for(lambda: place.rows() > 0, processes, limit)
    first = time.monotonic()
    codes = end(processes, limit)
    if any(code != 0 for code in codes):
        said = "".join(place.said(f"straight-rank-{rank}")[-1500:] for rank in range(place.ranks))
        raise Failed(f"{place.layout} ended with {codes} although nobody was killed:\n{said}")
    losses = place.losses()
    return Reference(losses, first - begin, (time.monotonic() - first) / len(losses))


def kill(
    place: Place, moment: Moment, straight: Reference, processes: Sequence[Process], limit: float
) -> int:
    """Wait for the moment and kill; the number of rows there were then. A victim that is gone by
    then is left alone."""
    delay = moment.part * straight.of_row
    if moment.kind == "start":
        delay = moment.part * straight.to_first
    else:
        wait_for(lambda: place.rows() > moment.after, processes, limit)
        if moment.kind == "save":
            wait_for(lambda: bool(place.half_saved()), processes, limit)
            delay = moment.part * 0.03
    time.sleep(delay)
    pid = place.folder / "pids" / str(moment.victim)
    if len(processes) == place.ranks:  # each is a rank, none of them an agent
        processes[moment.victim].kill()
    elif wait_for(pid.exists, processes, limit):
        with suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL)
    return place.rows()


def _through_bare(place: Place, result: Result, straight: Reference, limit: float) -> Result:
    victim = result.moment.victim
    processes, _store = bare(place, "killed")
    rows = kill(place, result.moment, straight, processes, limit)
    begin = time.monotonic()
    others = [rank for rank in range(place.ranks) if rank != victim]
    codes = end([processes[rank] for rank in others], 2 * place.timeout + 10)
    result = replace(
        result, seconds=round(time.monotonic() - begin, 2) if others else None, killed_at_row=rows
    )
    was_killed = processes[victim].wait() == -signal.SIGKILL
    for rank, code in zip(others, codes, strict=True):
        if code is None:
            raise Failed(
                f"rank {rank} still ran {result.seconds:g} s after rank {victim} was killed"
            )
        if (
            was_killed
            and code not in (0, -signal.SIGKILL)
            and f"rank {victim}" not in place.said(f"killed-rank-{rank}")
        ):
            raise Failed(f"rank {rank} ended with {code} and did not name rank {victim}")
        if code < 0:
            raise Failed(f"rank {rank} ended by signal {-code}")
    processes, _store = bare(place, "again")
    codes = end(processes, limit)
    if any(code != 0 for code in codes):
        raise Failed(f"started again, the ranks ended with {codes}")
    return result


def _through_torchrun(place: Place, result: Result, straight: Reference, limit: float) -> Result:
    options = [
        "--standalone",
        "--nproc-per-node",
        str(place.ranks),
        "--max-restarts",
        "2",
        "--monitor-interval",
        "0.2",
    ]
    agent = place.start("torchrun", ["-m", "torch.distributed.run", *options, *place.command()])
    agents = [
        agent,
        *([agent] if place.ranks == 1 else []),
    ]  # so that their number is never that of the ranks
    rows = kill(place, result.moment, straight, agents, limit)
    if (code := end([agent], 2 * limit)[0]) != 0:
        raise Failed(f"torchrun ended with {code}")
    return replace(result, killed_at_row=rows)


def one(place: Place, result: Result, straight: Reference, limit: float) -> Result:
    """One run, from its start to the verdict."""
    try:
        through = _through_bare if result.how == "bare" else _through_torchrun
        result = through(place, result, straight, limit)
        losses = place.losses()
        if len(losses) != len(straight.losses):
            raise Failed(
                f"{len(losses)} losses, of a run that nobody killed {len(straight.losses)}"
            )
        if losses != straight.losses:
            off = max(abs(a - b) for a, b in zip(losses, straight.losses, strict=True))
            raise Failed(f"losses differ by {off:.3g}")
        if left := place.half_saved():
            raise Failed(f"{left[0].name} was left behind")
    except Failed as failure:
        return replace(result, verdict=f"FAIL: {failure}")
    return result


def drawn(run: int, layouts: Sequence[str], generator: random.Random) -> Result:
    layout = layouts[run % len(layouts)]
    ranks, changes = LAYOUTS[layout]
    rows = 16 if "elastic" in changes else 24
    kind = generator.choice(MOMENTS)
    after = generator.randrange(rows - 1)
    if kind == "change":  # layers are frozen at the end of an epoch, of 4 steps
        after = 4 * generator.randrange(1, rows // 4) - 1
    moment = Moment(kind, generator.randrange(ranks), after, generator.random())
    return Result(run, layout, ranks, generator.choice((*["bare"] * 5, "torchrun")), moment)


def _row(result: Result) -> str:
    m = result.moment
    when = (
        f"{m.kind}, {100 * m.part:.0f} %" if m.kind == "start" else f"{m.kind} after row {m.after}"
    )
    ended = "" if result.seconds is None else f"{result.seconds:.1f} s"
    return (
        f"{result.run:4}  {result.layout:16} {result.how:9} rank {m.victim}  {when:20} "
        f"{ended:>7}  {result.verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the runs and print a line for each; returns 1 when one of them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.soak", description="Kill ranks at random instants."
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument(
        "--first",
        type=int,
        default=0,
        help="the number of the first run; the same number is the same run",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only layouts whose name contains this")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds that ranks wait for each other"
    )
    parser.add_argument(
        "--limit", type=float, default=300.0, help="seconds that a run may take in all"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where failed runs and soak.jsonl stay; default: a temporary one",
    )
    given = parser.parse_args(arguments)
    layouts = [name for name in LAYOUTS if given.only in name]
    if not layouts:
        parser.error(f"no layout has {given.only!r} in its name; there are {', '.join(LAYOUTS)}")
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="soak-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.py"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(300)))
    straight: dict[str, Reference] = {}
    failed = 0
    for run in range(given.first, given.first + given.runs):
        result = drawn(run, layouts, random.Random(f"{given.seed} {run}"))
        if result.layout not in straight:
            place = Place(folder / f"straight {result.layout}", result.layout, given.timeout)
            shutil.rmtree(place.folder, ignore_errors=True)
            place.write(text)
            straight[result.layout] = reference(place, given.limit)
        place = Place(folder / f"run-{run:03}", result.layout, given.timeout)
        shutil.rmtree(place.folder, ignore_errors=True)
        place.write(text)
        result = one(place, result, straight[result.layout], given.limit)
        print(_row(result), flush=True)
        with open(folder / "soak.jsonl", "a") as rows:
            rows.write(json.dumps(asdict(result)) + "\n")
        if result.verdict == "resumed":
            shutil.rmtree(place.folder)
        else:
            failed += 1
    print(
        f"{given.runs - failed} of {given.runs} resumed with the losses of a run that "
        f"nobody killed; what failed is in {folder}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
