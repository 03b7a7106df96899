"""The layers of a CoAtNet and its optimizer, timed, with few images and with more, all ranks at the
same time: whole on each rank, and shared by the ranks of tensor parallelism with their messages."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.mesh import ALONE, Axes, Mesh, resolve
from pyops.models import CoAtNet
from pyops.pipeline import Profile, profile
from pyops.plan.costs.measured import Line, MeasuredLayers
from pyops.plan.measuring.blocks import ELEMENTS, launch_seconds, optimizer_step
from pyops.plan.measuring.machine import processors
from pyops.plan.shapes import ImageShape, PlanError
from pyops.precision import PRECISIONS

__all__ = ["measure_layers"]

IMAGES = (2, 8)
ROUNDS = 5


def measure_layers(
    shape: ImageShape,
    *,
    precision: str = "fp32",
    images: tuple[int, int] = IMAGES,
    tp: Iterable[int] = (1,),
) -> MeasuredLayers:
    """Time a model's layers here, on the CPU. A collective: all ranks measure at the same time, and
    have the same result, the mean.

    Args:
        shape: Of the model.
        precision: "fp32", "bf16" or "fp16".
        images: Of a micro-batch: few and many; what lies between is read off a line through both.
        tp: Degrees of tensor parallelism, 1 beside them; those that do not divide the ranks, or by
            which the model can't be shared, are left out.

    Raises:
        PlanError: For a precision that there is not, or images that are not few and then many.
    """
    if precision not in PRECISIONS:
        raise PlanError(f"precision is {precision!r}; choose one of {', '.join(PRECISIONS)}")
    few, many = images
    if not 0 < few < many:
        raise PlanError(f"images is {images!r}; give two numbers above 0, the smaller one first")
    group = resolve(None, "measure_layers")
    ranks = 1 if group is None else dist.get_world_size(group)
    degrees = [t for t in sorted({1, *tp}) if ranks % t == shape.most_ranks_of_tp % t == 0]
    # More ranks than processors took turns while they were timed on the wall.
    own_part = min(1.0, processors() / torch.get_num_threads() / ranks)
    forward, backward = {}, {}
    for t in degrees:
        timed = [_profile(shape, precision, number, ranks=ranks, tp=t) for number in images]
        forward[t], backward[t] = (
            _lines(timed, images, part, own_part) for part in ("forward", "backward")
        )
    own = [*(optimizer_step(number, precision) for number in ELEMENTS), launch_seconds()]
    every = gather(own, group=group) if group is not None else [own]
    small, large, launch = (statistics.fmean(each) for each in zip(*every, strict=True))
    step = Line.through((ELEMENTS[0], small), (ELEMENTS[1], large))
    return MeasuredLayers(forward, backward, optimizer=step, launch=launch)


def _profile(shape: ImageShape, precision: str, images: int, *, ranks: int, tp: int) -> Profile:
    dtype = PRECISIONS[precision].dtype
    line = Mesh(Axes(dp=ranks // tp, tp=tp)) if tp > 1 else ALONE
    layers = CoAtNet(shape.config, group=line, seed=0, dtype=dtype).layers()
    batch = torch.zeros(images, shape.config.num_channels, *shape.config.sides, dtype=dtype)
    return profile(layers, batch, rounds=ROUNDS, group=ALONE if ranks == 1 else None)


def _lines(
    timed: list[Profile], images: tuple[int, int], part: str, own_part: float
) -> tuple[Line, ...]:
    """Of each layer, through two numbers of images."""
    few, many = (float(number) for number in images)
    return tuple(
        Line.through(
            (few, own_part * getattr(first, part)), (many, own_part * getattr(second, part))
        )
        for first, second in zip(timed[0].layers, timed[1].layers, strict=True)
    )
