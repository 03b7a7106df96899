"""What the planner says of layouts of a CoAtNet on this machine, beside their runs: eleven layouts
on 1, 2 and 4 processes of one thread each, as `bench_plan` has those of a GPT.

The model has CoAtNet-0's blocks, half as wide, and images of 64 pixels. Layers, the optimizer and
links are measured with as many ranks as work; memory is that of the formulas. Nothing is fitted to
these layouts, of which few have many messages: what a message takes beside its link, and how long
ranks wait for the slowest, is what `bench_plan` found with a GPT.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.instruments.harness import Row
from benchmarks.plan.bench_plan import Tried, machine_of, run_tried, show
from benchmarks.plan.plan_image_teams import IMAGE_LAYOUTS, IMAGE_SIZES, ImageSize, case_of
from pyops.plan import ImageCase, Line, MeasuredLayers

__all__ = ["run"]


def _case(size: ImageSize, found: Mapping[str, Any]) -> ImageCase:
    """Of what a rank has measured."""
    costs = found["costs"]

    def lines(part: str) -> dict[int, tuple[Line, ...]]:
        several = costs[part].items()
        return {int(tp): tuple(Line(**line) for line in layers) for tp, layers in several}

    measured = MeasuredLayers(
        lines("forward"),
        lines("backward"),
        optimizer=Line(**costs["optimizer"]),
        launch=costs["launch"],
    )
    return case_of(size, machine_of(found["machine"]), measured)


def run(options: Any, *, size: str = "half") -> list[Row]:
    """The rows of all layouts, and one of all together."""
    if options.device.type == "cuda":
        print("of processes on a CPU: nothing to do for a GPU")
        return []
    wanted = IMAGE_SIZES[size]
    case, module = partial(_case, wanted), "benchmarks.plan.plan_image_teams"
    tried = Tried(module, size, IMAGE_LAYOUTS, wanted.ranks, case, fits=False)
    return show(run_tried(options, tried, bench="plan_images"))
