"""Which layout: all that there are, those that fit, priced; and why not the others.

    tp    divisors of the heads, up to a node        pp    up to the blocks, with each schedule
    dp    what is left of the ranks                  zero  0 to 3; 0 or 1 with a pipeline
    micro-batch: powers of two                       recompute: nothing, attention, blocks

Layouts whose times differ by less than a percent are alike: that with fewer axes is taken, and of
these that whose micro-batches are large enough, and that with less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pyops.plan.clusters import GIB
from pyops.plan.layout import RECOMPUTE, SEVERAL_STAGES, Layout
from pyops.plan.rank_memory import ADAM, Memory, memory
from pyops.plan.shapes import PlanError
from pyops.plan.times import Case, StepTime, step_time
from pyops.plan.turns import fewest_microbatches

__all__ = ["Found", "Options", "Priced", "search"]

STAGES = (2, 3, 4, 6, 8)  # of a rank, with the schedules that have several
ALIKE = 0.01  # of the time
ENOUGH_TOKENS = 8192  # of a micro-batch: with fewer the host has too little time to launch kernels


@dataclass(frozen=True)
class Options:
    """What is asked for besides the model and the cluster."""

    batch: int = 0
    """Rows of a step; 0: one micro-batch for each device, and four for each rank of a pipeline."""
    precision: str = "bf16"
    """ "fp32", "bf16" or "fp16"."""
    optimizer_bytes: float = ADAM
    """Bytes of an element's optimizer states; 8: Adam's."""
    memory_part: float = 0.92
    """Which part of a device's memory may be used."""
    recompute: tuple[str, ...] = RECOMPUTE
    """What may be computed again, of `pyops.plan.layout.RECOMPUTE`."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Layout` that must have a value: {"tp": 2}."""

    def validate(self) -> None:
        """Check every field.

        Raises:
            PlanError: Naming field, value and fix.
        """
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 0:
            raise PlanError(f"batch is {self.batch!r}; give a whole number of rows, 0 or more")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise PlanError(f"precision is {self.precision!r}; choose one of fp32, bf16, fp16")
        if not 0 < self.memory_part <= 1:
            raise PlanError(
                f"memory_part is {self.memory_part!r}; give a number above 0, up to 1, such as 0.92"
            )
        if strange := [each for each in self.recompute if each not in RECOMPUTE]:
            raise PlanError(f"recompute has {strange[0]!r}; choose among {', '.join(RECOMPUTE)}")
        if not self.optimizer_bytes >= 0:
            raise PlanError(
                f"optimizer_bytes is {self.optimizer_bytes!r}; give 8 for Adam, 4 for momentum, 0"
            )
        if strange := sorted(set(self.fixed) - set(Layout.__dataclass_fields__)):
            raise PlanError(
                f"fixed has {strange[0]!r}, which a layout has not; it has "
                f"{', '.join(Layout.__dataclass_fields__)}"
            )


@dataclass(frozen=True)
class Priced:
    """A layout with what it takes."""

    layout: Layout
    """How the training is shared out."""
    memory: Memory
    """Bytes of a rank."""
    time: StepTime
    """Seconds of a step."""

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.time.total


@dataclass(frozen=True)
class Found:
    """What a search has found, the fastest first."""

    fitting: tuple[Priced, ...]
    """Layouts that fit, the fastest first."""
    smallest: Priced
    """The layout that takes least memory, whether or not it fits."""
    num_tried: int
    """All that were tried."""
    reasons: tuple[tuple[str, str], ...]
    """(simpler strategy, why it is not the one)."""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _widths(case: Case, ranks: int) -> list[int]:
    """Degrees of tp."""
    found = []
    for t in _divisors(case.shape.num_heads):
        grouped = case.shape.kv_heads % t == 0 or t % case.shape.kv_heads == 0
        even = case.shape.inner % t == 0
        if t <= case.cluster.devices_per_node and ranks % t == 0 and grouped and even:
            found.append(t)
    return found


def _pipelines(case: Case, ranks: int) -> Iterator[tuple[int, str, int]]:
    """(pp, schedule, stages of a rank)."""
    yield 1, "none", 1
    layers = case.shape.num_layers
    for p in _divisors(ranks):
        if not 1 < p <= layers:
            continue
        for schedule in ("1f1b", "zb1p"):
            yield p, schedule, 1
        if 2 * p <= layers:
            yield p, "zbv", 2
        for v in STAGES:
            if v * p <= layers:
                yield p, "interleaved", v


def _layouts(case: Case, options: Options, batch: int) -> Iterator[Layout]:
    """All that make a whole grid and share the rows of a batch."""
    ranks = case.cluster.num_devices
    fused = case.software.fused_attention  # whose core has little to compute again
    recomputes = tuple(each for each in options.recompute if not (fused and each == "attention"))
    pipelines = list(_pipelines(case, ranks))
    for t in _widths(case, ranks):
        for p, schedule, v in pipelines:
            if ranks % (t * p) or batch % (ranks // (t * p)):
                continue
            d = ranks // (t * p)
            for b in _micro_batches(batch // d):
                base = Layout(
                    tp=t, pp=p, dp=d, micro_batch=b, num_microbatches=batch // d // b,
                    schedule=schedule, stages_per_rank=v,
                )  # fmt: skip
                if base.num_microbatches < fewest_microbatches(base):
                    continue
                if schedule in SEVERAL_STAGES and base.num_microbatches % p:
                    continue
                yield from _variants(base, recomputes)


def _variants(base: Layout, recomputes: tuple[str, ...]) -> Iterator[Layout]:
    stages = (0,) if base.dp == 1 else (0, 1) if base.pp > 1 else (0, 1, 2, 3)
    for zero in stages:
        for recompute in recomputes:
            for sequence in (False, True) if base.tp > 1 else (False,):
                yield replace(base, zero=zero, recompute=recompute, sequence_parallel=sequence)


def _micro_batches(rows: int) -> list[int]:
    return [b for b in (1, 2, 4, 8, 16, 32) if rows % b == 0]


def usual_batch(case: Case) -> int:
    """Rows of a step where none are asked for: four for each device."""
    return 4 * case.cluster.num_devices


def price(case: Case, options: Options, layout: Layout) -> Priced:
    """What a layout takes; its time is left out where it does not fit.

    Args:
        case: The model, the cluster, the program.
        options: The optimizer, and the part of the memory that may be used.
        layout: How the training is shared out.
    """
    taken = memory(
        case.shape,
        layout,
        case.software,
        precision=case.precision,
        device=case.cluster.device,
        optimizer_bytes=options.optimizer_bytes,
    )
    fits = taken.total <= options.memory_part * case.cluster.device.memory_gib * GIB
    return Priced(layout, taken, step_time(case, layout) if fits else StepTime())


def search(case: Case, options: Options) -> Found:
    """The layouts that fit, the fastest first.

    Args:
        case: The model, the cluster, the program.
        options: What is asked for besides.

    Raises:
        PlanError: For options that make no sense, or that no layout has.
    """
    options.validate()
    batch = options.batch or usual_batch(case)
    room = options.memory_part * case.cluster.device.memory_gib * GIB
    tried, fitting = 0, []
    smallest: Priced | None = None
    # The best of each simpler strategy, that fits or that takes least.
    simple: dict[str, Priced] = {}
    for layout in _layouts(case, options, batch):
        if any(getattr(layout, name) != value for name, value in options.fixed.items()):
            continue
        tried += 1
        priced = price(case, options, layout)
        if smallest is None or priced.memory.total < smallest.memory.total:
            smallest = priced
        if priced.memory.total <= room:
            fitting.append(priced)
        _keep(simple, priced, room)
    if smallest is None:
        raise PlanError(_nothing(case, options, batch))
    fitting.sort(key=lambda each: each.seconds)
    alike = [each for each in fitting if each.seconds <= (1.0 + ALIKE) * fitting[0].seconds]
    rows = case.shape.sequence_length
    alike.sort(
        key=lambda each: (
            each.layout.axes_used,
            each.layout.zero == 3,
            -min(ENOUGH_TOKENS, rows * each.layout.micro_batch),
            each.memory.total,
        )
    )
    fitting = alike[:1] + [each for each in fitting if each is not alike[0]] if alike else []
    reasons = _reasons(simple, fitting[0], room) if fitting else ()
    return Found(tuple(fitting), smallest, tried, tuple(reasons))


def _nothing(case: Case, options: Options, batch: int) -> str:
    if options.fixed:
        given = ", ".join(f"{name}={value!r}" for name, value in options.fixed.items())
        return (
            f"fixed is {given}, which no layout of {case.cluster.num_devices} devices with {batch} "
            f"rows a step has; leave one of them out, or change the batch"
        )
    return (
        f"batch is {batch} rows, which no layout of {case.cluster.num_devices} devices can share; "
        f"give a multiple of {case.cluster.num_devices}"
    )


# By whether there are ranks of tp, of pp and of dp.
STRATEGIES = {
    (False, False, False): "one rank",
    (False, False, True): "one rank a copy, whole (dp)",
    (True, False, False): "tp alone",
    (False, True, False): "pp alone",
    (True, False, True): "tp and dp",
    (False, True, True): "pp and dp",
    (True, True, False): "tp and pp",
    (True, True, True): "tp, pp and dp",
}
ONLY_COPIES = ("one rank a copy, whole (dp)", *(f"ZeRO {stage} alone" for stage in (1, 2, 3)))
ORDER = (*ONLY_COPIES, *(name for name in STRATEGIES.values() if name not in ONLY_COPIES))


def _strategy(layout: Layout) -> str:
    if layout.tp == layout.pp == 1 < layout.dp:
        return ONLY_COPIES[layout.zero]
    return STRATEGIES[layout.tp > 1, layout.pp > 1, layout.dp > 1]


def _keep(simple: dict[str, Priced], priced: Priced, room: float) -> None:
    """Of each strategy, the fastest that fits, or that which takes least."""
    name = _strategy(priced.layout)
    best = simple.get(name)
    if best is None:
        simple[name] = priced
    elif best.memory.total <= room:
        if priced.memory.total <= room and priced.seconds < best.seconds:
            simple[name] = priced
    elif priced.memory.total < best.memory.total:
        simple[name] = priced


TERMS = {
    "recomputed": "what is computed again",
    "tensor_messages": "messages of tp",
    "pipeline_messages": "messages of pp",
    "idle": "the bubble of the pipeline",
    "data_messages": "messages of dp",
    "optimizer": "the optimizer's step",
    "products": "products of the slowest rank",
    "attention": "attention",
    "between": "what lies between the products",
    "host": "launching kernels",
    "stragglers": "stragglers",
}


def _reasons(simple: dict[str, Priced], best: Priced, room: float) -> Iterator[tuple[str, str]]:
    """Why each simpler strategy is not the one that was found."""
    ranks = best.layout.num_ranks
    for name in ORDER:
        if name == _strategy(best.layout) or (name == "one rank") == (ranks > 1):
            continue
        other = simple.get(name)
        if other is None:
            yield name, "makes no grid of these ranks, heads, blocks and rows"
        elif other.memory.total > room:
            over = (other.memory.total - room) / GIB
            most = max(
                ("parameters", "gradients", "states", "activations", "logits"),
                key=lambda term: float(getattr(other.memory, term)),
            )
            yield (
                name,
                f"{other.memory.gib:.1f} GiB at the least, {over:.1f} more than there are; most of "
                f"it {most}",
            )
        else:
            differences = {
                term: getattr(other.time, term) - getattr(best.time, term) for term in TERMS
            }
            worst = max(differences, key=lambda term: differences[term])
            slower = other.seconds / best.seconds - 1.0
            yield (
                name,
                f"{slower:.0%} slower ({other.layout}, ZeRO {other.layout.zero}, "
                f"{other.memory.gib:.1f} GiB): {TERMS[worst]} {differences[worst]:+.3g} s"
                if slower >= ALIKE
                else f"as fast ({other.layout}, ZeRO {other.layout.zero}, "
                f"{other.memory.gib:.1f} GiB)",
            )
