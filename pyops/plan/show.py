"""A plan as text: the table of layouts, bars of memory and of a step's time, the laws, the command.

| part                     |                                                |
|--------------------------|------------------------------------------------|
| `table(plan)`            | the best and the runners-up                    |
| `explain(plan)`          | why not the others, the laws, failures, sources |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from pyops.plan.clusters import GIB
from pyops.plan.costs.rank_memory import Memory
from pyops.plan.costs.times import StepTime
from pyops.plan.laws import amdahl, gustafson
from pyops.plan.layouts.pricing import Priced
from pyops.plan.result import Plan
from pyops.plan.shapes import count

__all__ = ["bars", "explain", "summary", "table"]

WIDTH = 44  # columns of a bar
FULL = 0.92  # of the memory; above it a plan is marked
UNCERTAIN = "from peaks and constants fitted to published runs, +-25 %: docs/planner.md"
FROM_BLOCKS = "from blocks, the optimizer and links as they were measured: docs/planner.md"
DAY = 86400.0


def table(plan: Plan, *, rows: int = 6) -> str:
    """The best layout and the next ones.

    Args:
        plan: What was found.
        rows: How many layouts.
    """
    lines = [
        f"  {'layout':24} zero {'micro':>9} {'recompute':9} {'schedule':14} {'GiB':>6} "
        f"{'step':>8} {plan.shape.unit + '/s each':>10} {'MFU':>5}"
    ]
    for number, each in enumerate((plan.best, *plan.runners_up[: rows - 1])):
        lines.append(("* " if not number else "  ") + _row(plan, each))
    return "\n".join(lines)


def _row(plan: Plan, each: Priced) -> str:
    layout = each.layout
    schedule = layout.schedule if layout.pp > 1 else ""
    if layout.stages_per_rank > 1:
        schedule += f" v {layout.stages_per_rank}"
    name = f"{layout}{', sp' if layout.sequence_parallel else ''}"
    name += f", {layout.cp_method}" if layout.cp > 1 else ""
    name += ", offload" if layout.offload != "none" else ""
    name += f", {layout.codec}" if layout.codec != "none" else ""
    micro = f"{layout.micro_batch}x{layout.num_microbatches}"
    return (
        f"{name:24} {layout.zero:4} {micro:>9} {layout.recompute:9} {schedule:14} "
        f"{each.memory.gib:6.1f} {seconds(each.seconds):>8} "
        f"{plan.tokens_per_second(each):10,.0f} {plan.mfu(each):5.0%}"
        f"{'  measured' if each.measured else ''}"
    ).rstrip()


def seconds(value: float) -> str:
    """A time with its unit.

    Args:
        value: Seconds.
    """
    for limit, unit, scale in ((1.0, "ms", 1e-3), (600.0, "s", 1.0), (7200.0, "min", 60.0)):
        if value < limit:
            return f"{value / scale:.3g} {unit}"
    if value < 2 * DAY:
        return f"{value / 3600:.3g} h"
    return f"{value / DAY:.3g} days"


def bars(parts: Mapping[str, float], *, unit: str, scale: float) -> str:
    """A bar for each part, the longest first.

    Args:
        parts: {name: value}.
        unit: Of what is written behind the bars.
        scale: What a value is divided by for that.
    """
    total = sum(parts.values()) or 1.0
    lines = []
    for name, value in sorted(parts.items(), key=lambda each: -each[1]):
        if value / total < 0.005:
            continue
        bar = "#" * max(1, round(WIDTH * value / total))
        text = f"  {name.replace('_', ' '):18} {bar:{WIDTH}} {value / scale:8.3g} {unit}"
        lines.append(f"{text} {value / total:4.0%}")
    return "\n".join(lines)


def summary(plan: Plan) -> str:
    """What was asked for, in one line, and how many layouts there are."""
    cluster, shape = plan.cluster, plan.shape
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''}"
    return (
        f"{shape.name}, {count(shape.num_parameters)} parameters, on "
        f"{cluster.num_devices} x {cluster.device.name} ({nodes}), {plan.options.precision}, "
        f"{plan.layout.batch} {shape.rows} a step\n"
        f"{plan.num_tried:,} layouts, {plan.num_fitting:,} fit"
    )


def explain(plan: Plan, *, tokens: float = 0.0, sources: bool = True) -> str:
    """Memory and time by what takes them, why not the others, laws, failures, sources.

    Args:
        plan: What was found.
        tokens: Of the whole training; 0: nothing is said of it.
        sources: Whether to say where the figures of the cluster come from.
    """
    best = plan.best
    part = best.memory.gib / plan.cluster.device.memory_gib
    memory = {f.name: getattr(best.memory, f.name) for f in fields(Memory)}
    times = {f.name: getattr(best.time, f.name) for f in fields(StepTime)}
    texts = [
        f"memory of the fullest rank: {best.memory.gib:.1f} of {plan.cluster.device.memory_gib:g} "
        f"GiB, {part:.0%}{' (little is left)' if part > FULL else ''}",
        bars(memory, unit="GiB", scale=GIB),
        _step(plan),
        bars(times, unit="s", scale=1.0),
        f"MFU: {plan.shape.convention}",
        "why not simpler",
        "\n".join(f"  {name:28} {why}" for name, why in plan.reasons),
        *_laws(plan),
        _failures(plan, tokens),
    ]
    if sources:
        texts.append("figures of the cluster")
        texts.append(
            "\n".join(f"  {figure}: {why}" for figure, why in plan.cluster.sources.items())
        )
    return "\n".join(texts)


def _step(plan: Plan) -> str:
    best = plan.best
    if best.measured:
        predicted = seconds(best.time.total)
        return f"a step: {seconds(best.measured)}, measured; predicted were {predicted}:"
    source = FROM_BLOCKS if plan.measured else UNCERTAIN
    return f"a step of the slowest rank: {seconds(best.seconds)}, {source}"


def _laws(plan: Plan) -> list[str]:
    q = plan.parallel_part
    lines = [
        f"scaling: twice the ranks with the same batch {amdahl(2, parallel=q):.2f}x (Amdahl, "
        f"{q:.1%} of a step is shared), with twice the batch {gustafson(2, parallel=q):.2f}x "
        "(Gustafson)"
    ]
    layout, rows = plan.layout, plan.layout.batch
    copy = layout.num_ranks // layout.dp
    lines.append(
        f"batch: its {rows:,} rows are enough for {rows:,} copies of {copy} rank"
        f"{'s' if copy > 1 else ''}; {layout.dp:,} are planned"
    )
    if plan.layout.dp > 1:
        law = plan.sync_sgd
        lines.append(
            f"copies: T_sync {seconds(law.sync)} {'<' if law.pays else '>='} (R - 1) T_comp = "
            f"{plan.layout.dp - 1} x {seconds(law.compute)}: they {'' if law.pays else 'do not '}"
            f"pay, efficiency {law.efficiency:.1%}"
        )
    return lines


def _failures(plan: Plan, tokens: float) -> str:
    failures = plan.failures()
    parts = failures.parts()
    most = max(parts, key=lambda name: parts[name])
    text = (
        f"failures: one in {seconds(failures.between)} "
        f"({plan.cluster.device_hours:,.0f} hours of a device), save every "
        f"{seconds(failures.interval)} where a save takes {failures.save_seconds:g} s: "
        f"{failures.lost():.1%} of the time lost, most of it {most}"
    )
    if not tokens:
        return text
    run = plan.seconds_for(tokens)
    return (
        f"{text}\ntraining on {tokens:.3g} tokens: {seconds(run)}, with failures "
        f"{seconds(run / max(1e-9, 1.0 - failures.lost()))}, {failures.expected(run):.1f} of them"
    )
