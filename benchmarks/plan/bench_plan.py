"""What the planner says of layouts of a GPT on this machine, beside their runs: 20 layouts on 1, 2
and 4 processes of one thread each, the rows of a step the same for all.

    predicted    from this machine, its links and the model's blocks, measured with as many ranks
    measured     steps as `pyops train` takes them, all layouts in turn; bytes that tensors take

Every third layout is one to which two numbers are fitted: what a message takes beside its time on
the link, in launches of an operation, and the deviation of a rank's step, of which all wait for the
slowest; the others are held out. The last row has what all say together, and the two numbers,
which `pyops.plan.costs.measured` has for machines where no layouts were run.
"""

from __future__ import annotations

import itertools
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, keep_row
from benchmarks.instruments.rank_teams import Team
from benchmarks.plan.plan_teams import LAYOUTS, PRECISION, SIZES, Size, shape_of
from benchmarks.plan.planned_choices import CHOICES, Choice
from pyops.plan import (
    PYOPS,
    Case,
    Cluster,
    ImageCase,
    Layout,
    Line,
    Machine,
    MeasuredCosts,
    StepTime,
    image_memory,
    image_step,
    memory,
    step_time,
)
from pyops.plan.costs.measured import OF_A_MESSAGE
from pyops.plan.costs.measured import STRAGGLING as DEVIATION

__all__ = [
    "Measured",
    "Tried",
    "fit",
    "machine_of",
    "rank_correlation",
    "rows_of",
    "run",
    "run_tried",
    "search_row",
    "show",
    "together",
    "with_overheads",
]

ROUNDS = 9
MESSAGES = tuple(25.0 * i for i in range(41))  # overheads that are looked at
STRAGGLING = tuple(0.005 * i for i in range(61))  # deviations that are looked at
THIRD = 3
LEAST = {"rank_correlation": 0.9}
MOST = {"best_predicted_over_best": 1.10, "memory_off_most": 0.05}
SOFTWARE = replace(PYOPS, fragmentation=1.0)


@dataclass(frozen=True)
class Measured:
    """A layout, what was measured of it and what the planner says."""

    layout: Layout
    """How ranks share the model."""
    seconds: tuple[float, ...]
    """Of its steps, on the slowest rank."""
    mib: float
    """Of the fullest rank."""
    case: Case | ImageCase
    """The machine with as many ranks."""
    fitted: bool
    """Whether overheads were fitted to it."""

    @property
    def step(self) -> float:
        """Seconds of a step: the median."""
        return statistics.median(self.seconds)

    @property
    def time(self) -> StepTime:
        """Of a step, predicted."""
        if isinstance(self.case, ImageCase):
            return image_step(self.case, self.layout)
        return step_time(self.case, self.layout)

    @property
    def planned(self) -> float:
        """Seconds of a step, predicted."""
        return self.time.total

    @property
    def planned_mib(self) -> float:
        """Of the fullest rank, predicted."""
        if isinstance(self.case, ImageCase):
            taken = image_memory(self.case, self.layout)
            return (taken.total - taken.reserved) / 2**20
        taken = memory(self.case.shape, self.layout, SOFTWARE, precision=PRECISION)
        return taken.total / 2**20

    @property
    def name(self) -> str:
        """For the table."""
        layout = self.layout
        parts = [f"{layout.num_ranks} process{'es' if layout.num_ranks > 1 else ''}"]
        parts += [str(layout)] if layout.num_ranks > 1 else []
        parts += [f"ZeRO {layout.zero}"] if layout.zero else []
        parts += [layout.schedule] if layout.pp > 1 else []
        parts += [layout.cp_method] if layout.cp > 1 else []
        parts += ["sequence parallel"] if layout.sequence_parallel else []
        what = "images" if isinstance(self.case, ImageCase) else "rows"
        parts += [f"{layout.micro_batch} x {layout.num_microbatches} {what}"]
        parts += ["blocks recomputed"] if layout.recompute == "block" else []
        return ", ".join(parts)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of numbers that are all different."""

    def ranks(values: Sequence[float]) -> list[int]:
        order = sorted(range(len(values)), key=lambda i: values[i])
        return [order.index(i) for i in range(len(values))]

    n = len(first)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(first), ranks(second), strict=True))
    return 1.0 - 6.0 * squares / (n * (n * n - 1))


def _lines(tree: Mapping[str, Mapping[str, float]]) -> dict[int, Line]:
    return {int(t): Line(**line) for t, line in tree.items()}


def machine_of(tree: Mapping[str, Any]) -> Cluster:
    """The machine that a rank has measured."""
    whole = dict(tree)
    whole["products"] = {
        kind: {int(width): rate for width, rate in widths.items()}
        for kind, widths in whole["products"].items()
    }
    return Machine(**whole).cluster()


def _case(size: Size, found: Mapping[str, Any]) -> Case:
    """Of what a rank has measured."""
    costs = dict(found["costs"])
    for part in ("forward", "backward", "ends_forward", "ends_backward"):
        costs[part] = _lines(costs[part])
    costs["optimizer"] = Line(**costs["optimizer"])
    del costs["of_a_message"], costs["straggling"]
    cluster = machine_of(found["machine"])
    return Case(shape_of(size), cluster, SOFTWARE, PRECISION, MeasuredCosts(**costs))


@dataclass(frozen=True)
class Tried:
    """What teams of ranks try."""

    module: str
    """That is run in each rank, with the name "plan" and `size`."""
    size: str
    """Which of the module's models."""
    layouts: Mapping[int, Sequence[Layout]]
    """By the number of ranks."""
    ranks: tuple[int, ...]
    """With how many ranks."""
    case: Callable[[Mapping[str, Any]], Case | ImageCase]
    """Of what a rank has measured."""
    fits: bool = True
    """Whether overheads are fitted to every third layout; else all layouts are held out, and the
    overheads are those of `pyops.plan.costs.measured`."""


def measured(tried: Tried, *, rounds: int) -> list[Measured]:
    """All layouts, measured and predicted."""
    with ExitStack() as stack:
        teams = {
            n: stack.enter_context(Team("plan", ranks=n, size=tried.size, module=tried.module))
            for n in tried.ranks
        }
        cases = {n: tried.case(team.call("machine")[0]) for n, team in teams.items()}
        taken = {n: team.call("prepare") for n, team in teams.items()}
        steps: dict[int, list[list[float]]] = {n: [] for n in teams}
        for _ in range(rounds):
            for n, team in teams.items():
                several = team.call("round")
                walls = [[wall for wall, _ in each] for each in several]
                steps[n].append([max(each) for each in zip(*walls, strict=True)])
    found: list[Measured] = []
    for n in teams:
        for i, layout in enumerate(tried.layouts[n]):
            most = max(each[i] for each in taken[n]) / 2**20
            seconds = tuple(each[i] for each in steps[n])
            fitted = tried.fits and len(found) % THIRD == 0
            found.append(Measured(layout, seconds, most, cases[n], fitted))
    return found


def fit(found: Sequence[Measured]) -> tuple[float, float]:
    """What a message takes beside its link, in launches, and the deviation of a rank's step, that
    are least off on the fitted layouts."""
    fitted = [each for each in found if each.fitted]

    def off(overheads: tuple[float, float]) -> float:
        several = with_overheads(fitted, overheads)
        return sum(abs(math.log(each.planned / each.step)) for each in several)

    return min(itertools.product(MESSAGES, STRAGGLING), key=off)


def together(found: Sequence[Measured]) -> dict[str, Any]:
    """What all rows say."""
    held_out = [each for each in found if not each.fitted]
    off = [abs(each.planned / each.step - 1.0) for each in held_out]
    bytes_off = [abs(each.planned_mib / each.mib - 1.0) for each in found]
    chosen = min(found, key=lambda each: each.planned)
    fastest = min(found, key=lambda each: each.step)
    return {
        "rank_correlation": rank_correlation(
            [each.planned for each in found], [each.step for each in found]
        ),
        "best_predicted_over_best": chosen.step / fastest.step,
        "held_out_off": statistics.fmean(off),
        "held_out_off_most": max(off),
        "memory_off": statistics.fmean(bytes_off),
        "memory_off_most": max(bytes_off),
        "chosen": chosen.name,
        "fastest": fastest.name,
    }


def _common(rounds: int, bench: str = "plan") -> dict[str, Any]:
    """Of every row."""
    return {
        "bench": bench,
        "device": "cpu",
        "speedup": {},
        "rounds": rounds,
        "machine": machine.describe(torch.device("cpu")) | {"threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def search_row(choice: Choice) -> Row:
    """How long a search takes on one core, and how much memory this process takes then."""
    start = time.process_time()
    plan = choice.plan()
    seconds = time.process_time() - start
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        **_common(1),
        "case": f"search, {choice.name} on {choice.cluster.num_devices:,} devices",
        "us": {"best": [round(1e6 * seconds, 3)] * 3},
        "layouts": plan.num_tried,
        "process_gib": round(kib / 2**20, 3),
        "most": {"ms": 30e3, "process_gib": 1.0},
    }


def rows_of(
    found: Sequence[Measured],
    *,
    rounds: int,
    overheads: tuple[float, float],
    bench: str = "plan",
) -> Iterator[Row]:
    """A row of each layout, and one of all together."""
    common = _common(rounds, bench)
    for each in found:
        yield {
            **common,
            "case": each.name,
            "us": {"a step": [round(1e6 * q, 3) for q in _quantiles(each.seconds)]},
            "planned_ms": round(1e3 * each.planned, 3),
            "planned_parts_ms": {
                name: round(1e3 * value, 3) for name, value in asdict(each.time).items() if value
            },
            "step_off": round(each.planned / each.step - 1.0, 4),
            "fitted": each.fitted,
            "mib": round(each.mib, 2),
            "planned_mib": round(each.planned_mib, 2),
            "mib_off": round(each.planned_mib / each.mib - 1.0, 4),
        }
    yield {
        **common,
        "case": f"{len(found)} layouts together",
        "us": {},
        "overheads": list(overheads),
        **together(found),
        "least": LEAST,
        "most": MOST,
    }


def with_overheads(found: Sequence[Measured], overheads: tuple[float, float]) -> list[Measured]:
    """The same, predicted with these overheads: of a message, and a rank's deviation."""
    message, straggling = overheads
    several = []
    for each in found:
        costs: Any = each.case.measured  # of either kind of model
        if costs is not None:
            costs = replace(costs, of_a_message=message, straggling=straggling)
            each = replace(each, case=replace(each.case, measured=costs))
        several.append(each)
    return several


def _quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    fifths = statistics.quantiles(seconds, n=5)
    return fifths[0], statistics.median(seconds), fifths[-1]


def show(rows: Iterable[Row]) -> list[Row]:
    """Print and keep rows, as they come."""
    found = []
    for row in rows:
        print({key: value for key, value in row.items() if key in SHOWN}, flush=True)
        keep_row(row)
        found.append(row)
    return found


def run_tried(options: Any, tried: Tried, *, bench: str) -> Iterator[Row]:
    """The rows of all layouts, and one of all together."""
    rounds = min(options.rounds, ROUNDS)
    found = measured(tried, rounds=rounds)
    overheads = fit(found) if tried.fits else (OF_A_MESSAGE, DEVIATION)
    found = with_overheads(found, overheads)
    yield from rows_of(found, rounds=rounds, overheads=overheads, bench=bench)


def run(options: Any, *, size: str = "reference") -> list[Row]:
    """The rows of all layouts of a GPT, and one of the largest search."""
    if options.device.type == "cuda":
        print("of processes on a CPU: nothing to do for a GPU")
        return []
    wanted = SIZES[size]
    tried = Tried("benchmarks.plan.plan_teams", size, LAYOUTS, wanted.ranks, partial(_case, wanted))
    rows = show(run_tried(options, tried, bench="plan"))
    return rows + show([search_row(CHOICES["nodes"][-1])])


SHOWN = (
    "case", "us", "overheads", "fitted", "planned_ms", "step_off", "mib", "planned_mib", "mib_off",
    "rank_correlation", "best_predicted_over_best", "held_out_off", "held_out_off_most",
    "memory_off", "memory_off_most", "chosen", "fastest", "layouts", "process_gib",
)  # fmt: skip
