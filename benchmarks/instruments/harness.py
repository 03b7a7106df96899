"""How everything is timed here: first check the result, then time ours and its rivals in turn.

    check -> calibrate -> ours peer ours peer ours peer ... -> median, 20 % and 80 % quantiles ->
    one JSON line

Rounds are interleaved so that a machine that slows down for a while slows all alike; a speed-up is
the median of the ratios within each round. A case that gives a wrong result raises instead of
printing a number; a rival that raises, or gives another result, is left out of the row.

Several processes time a case together through `Ranks`: a barrier before each sample, the slowest
rank's time counts,
and the number of repetitions is the first rank's.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.instruments import machine
from benchmarks.instruments.verdicts import verdicts

__all__ = [
    "Alone",
    "Case",
    "FailedCases",
    "Ranks",
    "Row",
    "append_rows",
    "format_row",
    "keep_row",
    "measure",
    "quantiles",
    "run_cases",
]

RESULTS = Path(__file__).resolve().parents[1] / "results"
Row = dict[str, Any]


class FailedCases(Exception):
    """Some cases of a bench raised; `rows` are those of the others."""

    def __init__(self, rows: list[Row], failed: list[str]) -> None:
        super().__init__(f"{len(failed)} cases failed, {len(rows)} did not: {'; '.join(failed)}")
        self.rows, self.failed = rows, failed


class Ranks(Protocol):
    """What the harness asks of several processes that time one case together."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""

    def slowest(self, seconds: float) -> float:
        """The largest value of all ranks, on every rank."""


class Alone:
    """One process: nobody to wait for."""

    def barrier(self) -> None:
        return None

    def agree(self, value: int) -> int:
        return value

    def slowest(self, seconds: float) -> float:
        return seconds


@dataclass(frozen=True)
class Case:
    """One line of a bench: the same work by pyops and by its rivals.

    implementations: name -> callable without arguments; the first is ours.
    check: raises when our result is wrong; returns the largest error, or None where there is
    nothing to say.
    prepare: name -> callable run before each call and not timed (fresh gradients, say).
    bytes_moved: bytes that one call must read and write at least; gives GB/s and percent of a copy.
    flops: operations that one call must do at least; gives TFLOP/s of all, and percent of a matrix
    product of ours. targets: rival -> how many times faster than it ours ought to be, for the
    report.
    least, most: field of the row -> what it ought to reach, or stay within: percent_of_copy, or ms,
    our median time.
    vet: rival -> callable that raises when the rival gives another result; called once, after
    `check`.
    facts: anything else the row ought to record. observe: called with the row when all is timed,
    for facts that follow from it
        or cost time; one that raises costs the row nothing else.
    """

    bench: str
    name: str
    implementations: Mapping[str, Callable[[], object]]
    check: Callable[[], float | None]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    prepare: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    bytes_moved: int | None = None
    flops: int | None = None
    targets: Mapping[str, float] = field(default_factory=dict)
    least: Mapping[str, float] = field(default_factory=dict)
    most: Mapping[str, float] = field(default_factory=dict)
    vet: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    observe: Callable[[Row], Mapping[str, Any]] | None = None


def _sample(case: Case, name: str, *, repeats: int, ranks: Ranks) -> float:
    """Seconds for one call of an implementation: the mean of `repeats` calls, preparation left
    out."""
    call, prepare = case.implementations[name], case.prepare.get(name)
    cuda = case.device.type == "cuda"
    ranks.barrier()
    total = 0.0
    for _ in range(repeats if prepare else 1):
        if prepare:
            prepare()
        if cuda:
            torch.cuda.synchronize(case.device)
        start = time.perf_counter()
        for _ in range(1 if prepare else repeats):
            call()
        if cuda:
            torch.cuda.synchronize(case.device)
        total += time.perf_counter() - start
    return ranks.slowest(total / repeats)


def _calibrate(case: Case, name: str, *, sample_seconds: float, ranks: Ranks) -> int:
    """How many calls make a sample of at least `sample_seconds`. A call that takes seconds is
    warmed up by one."""
    if _sample(case, name, repeats=1, ranks=ranks) > 100 * sample_seconds:
        return ranks.agree(1)
    for _ in range(2):
        _sample(case, name, repeats=1, ranks=ranks)
    once = min(_sample(case, name, repeats=1, ranks=ranks) for _ in range(3))
    return ranks.agree(max(1, min(1000, round(sample_seconds / max(once, 1e-7)))))


def _contenders(case: Case, *, sample_seconds: float, ranks: Ranks) -> dict[str, int]:
    """How many calls make a sample, of all implementations that work. Ours must; among several
    processes all must."""
    repeats: dict[str, int] = {}
    for name in case.implementations:
        try:
            if name in case.vet:
                case.vet[name]()
            repeats[name] = _calibrate(case, name, sample_seconds=sample_seconds, ranks=ranks)
        except Exception as error:
            if not repeats or not isinstance(ranks, Alone):
                raise
            print(
                f"{case.name}: {name} is left out: {type(error).__name__}: {str(error)[:300]}",
                flush=True,
            )
    return repeats


def quantiles(seconds: list[float]) -> list[float]:
    """20 % quantile, median and 80 % quantile, in microseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    low, high = ordered[round(0.2 * last)], ordered[round(0.8 * last)]
    return [round(1e6 * value, 3) for value in (low, statistics.median(ordered), high)]


def measure(
    case: Case, *, rounds: int = 15, sample_seconds: float = 0.01, ranks: Ranks | None = None
) -> Row:
    """Check the case, time it, and return its row.

    rounds: how often each implementation is sampled, in turn. sample_seconds: calls are repeated
    within a sample
    until it lasts about that long. Whatever `case.check` raises is raised.
    """
    ranks = ranks if ranks is not None else Alone()
    error = case.check()
    repeats = _contenders(case, sample_seconds=sample_seconds, ranks=ranks)
    names = list(repeats)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        # Each goes first in turn: what runs second finds caches as the first left them.
        for name in names if turn % 2 == 0 else reversed(names):
            seconds[name].append(_sample(case, name, repeats=repeats[name], ranks=ranks))
    ours = names[0]
    row: Row = {
        "bench": case.bench,
        "case": case.name,
        "device": case.device.type,
        "us": {name: quantiles(seconds[name]) for name in names},
        **_ratios(seconds, ours),
        "max_error": error,
        "rounds": rounds,
    }
    row |= _roofs(case, {name: statistics.median(seconds[name]) for name in names})
    row |= {
        key: dict(found) for key in ("targets", "least", "most") if (found := getattr(case, key))
    }
    row |= dict(case.facts)
    row |= _observed(case, row)
    row["machine"] = machine.describe(case.device)
    row["versions"], row["commit"] = machine.versions(), machine.commit()
    row["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return row


def _ratios(seconds: Mapping[str, list[float]], ours: str) -> Row:
    """How many times faster ours is than each rival: the median of the ratios within each round,
    and their 20 % and 80 % quantiles."""
    ratios = {
        name: [rival / own for rival, own in zip(each, seconds[ours], strict=True)]
        for name, each in seconds.items()
        if name != ours
    }
    found = {name: quantiles(each) for name, each in ratios.items()}
    return {
        "speedup": {name: round(middle / 1e6, 3) for name, (_, middle, _) in found.items()},
        "speedup_spread": {
            name: [round(low / 1e6, 3), round(high / 1e6, 3)]
            for name, (low, _, high) in found.items()
        },
    }


def _roofs(case: Case, medians: Mapping[str, float]) -> Row:
    """What a case that states its bytes or operations does a second, beside a copy and a matrix
    product of this process."""
    row: Row = {}
    ours = next(iter(medians))
    if case.bytes_moved is not None:
        copy, per_second = machine.copy_bandwidth(case.device), case.bytes_moved / medians[ours]
        row |= {
            "bytes": case.bytes_moved,
            "gb_per_s": round(per_second / 1e9, 2),
            "percent_of_copy": round(100 * per_second / copy, 1),
            "copy_gb_per_s": round(copy / 1e9, 2),
        }
        if case.device.type == "cuda":
            row["matmul_tflop_per_s"] = _digits(machine.matmul_flops(case.device) / 1e12)
    if case.flops is not None:
        matmul = machine.matmul_flops(case.device)
        row |= {
            "flops": case.flops,
            "tflop_per_s": {name: _digits(case.flops / s / 1e12) for name, s in medians.items()},
            "percent_of_matmul": round(100 * case.flops / medians[ours] / matmul, 1),
            "matmul_tflop_per_s": _digits(matmul / 1e12),
        }
        if case.device.type == "cuda":
            row["copy_gb_per_s"] = round(machine.copy_bandwidth(case.device) / 1e9, 2)
    return row


def _digits(value: float) -> float:
    """Four of them."""
    return float(f"{value:.4g}")


def _observed(case: Case, row: Row) -> Mapping[str, Any]:
    try:
        return dict(case.observe(row)) if case.observe is not None else {}
    except Exception as error:
        print(f"{case.name}: not observed: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return {}


def format_row(row: Row) -> str:
    """One line for a terminal: ours, where there are times, then each rival with the speed-up over
    it, and whether the target was met."""
    names = list(row["us"])
    ours, rivals = names[:1], names[1:]
    line = f"{row['case']:<52}"
    for name in ours:  # none in a row of losses, say
        low, middle, high = row["us"][name]
        line += f" {middle:>10.1f} us ({low:.1f}-{high:.1f})"
    if "gb_per_s" in row:
        line += f" {row['gb_per_s']:6.1f} GB/s {row['percent_of_copy']:5.1f} % of copy"
    if "tflop_per_s" in row:
        line += (
            f" {row['tflop_per_s'][ours[0]]:6.1f} TFLOP/s {row['percent_of_matmul']:5.1f} % of "
            "a product"
        )
    for name in rivals:
        line += f" | {row['speedup'][name]:.2f}x {name}"
    for verdict in verdicts(row):
        line += f" | {'meets' if verdict.met else 'BELOW'} {verdict.target}"
    return line


def append_rows(rows: Iterable[Row], *, folder: Path = RESULTS) -> Path | None:
    """Append rows as JSON lines to the file of their machine; returns that file, or None if there
    were no rows."""
    path = None
    for row in rows:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{machine.slug(row['machine'])}.jsonl"
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return path


def run_cases(
    cases: Iterable[Case | Callable[[], Case]], *, rounds: int = 15, sample_seconds: float = 0.01
) -> list[Row]:
    """Measure cases one after another in this process and print each row as it comes.

    A case may be given as a function that makes it, so that its tensors exist only while it is
    measured. Where the environment variable PYOPS_BENCH_ROWS names a file, each row is appended to
    it at once: a bench that is stopped keeps what it has. Raises FailedCases at the end when a case
    raised; its error is printed and the others are measured all the same.
    """
    rows: list[Row] = []
    failed: list[str] = []
    for case in cases:
        try:
            row = measure(
                case if isinstance(case, Case) else case(),
                rounds=rounds,
                sample_seconds=sample_seconds,
            )
        except Exception as error:
            traceback.print_exc()
            failed.append(f"{type(error).__name__}: {error}")
            print(f"FAILED {failed[-1]}", flush=True)
            continue
        finally:
            _release()
        print(format_row(row), flush=True)
        keep_row(row)
        rows.append(row)
    if failed:
        raise FailedCases(rows, failed)
    return rows


def _release() -> None:
    """Give the memory of the case before back: the next may need all of a GPU, and an optimizer can
    be part of a cycle."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def keep_row(row: Row) -> None:
    """Append the row to the file that PYOPS_BENCH_ROWS names, if it names one."""
    if path := os.environ.get("PYOPS_BENCH_ROWS"):
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")
