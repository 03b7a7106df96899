"""What `pyops simulate` prints: a schedule's timeline, how much of it is idle, and what each rank
keeps.

--profile: with the times and bytes of a model's layers, as `pyops.pipeline.profile(...).save(file)`
wrote them.

$ pyops simulate 1f1b --stages 2 --microbatches 3
  0 | 0  1  .  .  0' 0' 2  1' 1' .  2' 2'
  1 | .  0  0' 0' 1  1' 1' 2  2' 2' .  .
1f1b, 2 ranks, 3 micro-batches: 12 long, 25.0 % idle, 33.3 % longer than without a bubble
micro-batches kept, rank by rank: 2 1
"""

from __future__ import annotations

import argparse
import math
from shutil import get_terminal_size
from typing import Any

from pyops.pipeline import (
    NAMES,
    Costs,
    Profile,
    Schedule,
    Timeline,
    balance,
    draw,
    schedule,
    simulate,
    text,
    trace,
)

__all__ = ["add_arguments", "report"]


WIDTH = 120  # columns of a timeline, where the terminal has as many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(NAMES)}")
    parser.add_argument(
        "--stages", type=int, default=4, metavar="K", help="ranks of the pipeline (4)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=8, metavar="M", help="micro-batches of a step (8)"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="options",
        help="of the schedule: v=2, warmup=b, ...",
    )
    parser.add_argument("--recompute", choices=["always", "except_last", "never"], default="never")
    for name, default, meaning in (
        ("forward", 1.0, "a micro-batch's forward"),
        ("input-gradient", 1.0, "the gradient of its input"),
        ("weight-gradient", 1.0, "the gradient of the weights"),
        ("latency", 0.0, "a transfer's way"),
    ):
        parser.add_argument(
            f"--{name}",
            type=float,
            default=default,
            metavar="TIME",
            help=f"of {meaning} ({default:g})",
        )
    parser.add_argument(
        "--bandwidth",
        type=float,
        default=math.inf,
        metavar="BYTES",
        help="a second, of each channel (inf)",
    )
    parser.add_argument(
        "--profile", metavar="FILE.json", help="the layers, measured: in place of the times above"
    )
    parser.add_argument(
        "--by",
        choices=["time", "parameters", "memory"],
        default="time",
        help="how its layers are balanced (time)",
    )
    parser.add_argument("--draw", metavar="PICTURE", help="an .svg, .png or .pdf to write")
    parser.add_argument("--trace", metavar="FILE.json", help="a trace to write, for Perfetto")


def _value(given: str) -> Any:
    if given in ("true", "false"):
        return given == "true"
    try:
        return int(given)
    except ValueError:
        return given


def report(given: argparse.Namespace) -> str:
    """The text; writes the picture and the trace.

    Raises:
        ValueError: For what the schedule does not take.
    """
    options = {}
    for pair in given.options:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option {pair} is no assignment; write --option v=2, say")
        options[key] = _value(value)
    made = schedule(
        given.name, num_stages=given.stages, num_microbatches=given.microbatches, **options
    )
    made = made.with_recompute(given.recompute)
    parts = made.num_stages // made.num_ranks
    timeline, more = (
        _of_profile(made, given) if given.profile else (_of_times(made, given, parts), [])
    )
    kept = " ".join(f"{made.peak(rank) / parts:g}" for rank in range(made.num_ranks))
    lines = [
        text(
            timeline,
            width=min(WIDTH, get_terminal_size((WIDTH, 24)).columns),
            fit=bool(given.profile),
        ),
        f"{made.name}, {made.num_ranks} ranks, {made.num_microbatches} micro-batches: "
        f"{timeline.makespan:g} long, "
        f"{timeline.bubble:.1%} idle, {timeline.overhead:.1%} longer than without a bubble",
        f"micro-batches kept, rank by rank: {kept}",
        *more,
    ]
    if given.trace:  # before the picture, which needs matplotlib
        lines.append(f"trace: {trace(timeline, given.trace)}")
    if given.draw:
        lines.append(f"picture: {draw(timeline, given.draw)}")
    return "\n".join(lines)


def _of_times(made: Schedule, given: argparse.Namespace, parts: int) -> Timeline:
    """The times are those of all of a rank's stages."""
    return simulate(
        made,
        Costs(
            forward=given.forward / parts,
            input_gradient=given.input_gradient / parts,
            weight_gradient=given.weight_gradient / parts,
            latency=given.latency,
            bandwidth=given.bandwidth,
        ),
    )


def _of_profile(made: Schedule, given: argparse.Namespace) -> tuple[Timeline, list[str]]:
    profile = Profile.load(given.profile)
    bounds = balance(profile, num_stages=made.num_stages, by=given.by)
    costs = profile.costs(
        bounds, split=made.splits_backward, latency=given.latency, bandwidth=given.bandwidth
    )
    assert isinstance(costs.skipped, dict)
    timeline = simulate(made.with_skips(costs.skipped) if costs.skipped else made, costs)
    sizes = " ".join(f"{size / 2**20:.1f}" for size in timeline.memory)
    return timeline, [
        f"layers that stages begin with: {' '.join(map(str, bounds[:-1]))}",
        f"MiB, rank by rank: {sizes}",
    ]
