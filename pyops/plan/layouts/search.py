"""Which layout: all that there are, those that fit, priced; and why not the others.

Layouts whose times differ by less than a percent are alike: one that keeps its states beside its
parameters is taken, of these that with fewer axes, and of these that whose micro-batches are large
enough, and that with less memory. Offload is looked at where a layout does not fit without, for it
is never faster; codecs, which round gradients, are chosen where they are asked for alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pyops.plan.costs.computing import Case
from pyops.plan.costs.images import ImageCase
from pyops.plan.layout import Layout
from pyops.plan.layouts.enumeration import codec_variants, layouts, offloaded
from pyops.plan.layouts.grids import grid_reasons
from pyops.plan.layouts.images import image_layouts
from pyops.plan.layouts.options import Options
from pyops.plan.layouts.pricing import Priced, price, room_of
from pyops.plan.layouts.reasons import ALIKE, Strategies, reasons
from pyops.plan.shapes import PlanError

__all__ = ["Found", "search"]

ENOUGH_TOKENS = 8192  # of a micro-batch: with fewer the host has too little time to launch kernels


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


def usual_batch(case: Case | ImageCase) -> int:
    """Rows of a step where none are asked for: four for each device, or 64 images."""
    return (64 if isinstance(case, ImageCase) else 4) * case.cluster.num_devices


def _every(case: Case | ImageCase, options: Options, batch: int) -> Iterator[tuple[Layout, ...]]:
    """Each layout, followed by those that are it but for states in host memory or codecs."""
    if isinstance(case, ImageCase):
        for layout in image_layouts(case, options, batch):
            yield (layout,)
        return
    for layout in layouts(case, options, batch):
        yield layout, *offloaded(layout), *codec_variants(layout)


def search(case: Case | ImageCase, options: Options) -> Found:
    """The layouts that fit, the fastest first.

    Args:
        case: The model, the cluster, the program.
        options: What is asked for besides.

    Raises:
        PlanError: For options that make no sense, or that no layout has.
    """
    options.validate()
    batch = options.batch or usual_batch(case)
    room = room_of(case, options)
    tried, fitting = 0, []
    smallest: Priced | None = None
    strategies = Strategies()

    def look(layout: Layout, *, choose: bool) -> bool:
        """Price a layout; whether it fits."""
        nonlocal tried, smallest
        tried += 1
        priced = price(case, options, layout)
        if smallest is None or priced.memory.total < smallest.memory.total:
            smallest = priced
        fits = priced.seconds > 0
        if fits and choose:
            fitting.append(priced)
        strategies.keep(priced, fits=fits)
        return fits

    def wanted(layout: Layout) -> bool:
        return all(getattr(layout, name) == value for name, value in options.fixed.items())

    asked = ("none", *options.codecs, options.fixed.get("codec"))
    for layout, *others in _every(case, options, batch):
        fits = wanted(layout) and look(layout, choose=True)
        for other in filter(wanted, others):
            if other.offload == "none" or not (fits or case.cluster.host is None):
                look(other, choose=other.codec in asked)
    if smallest is None:
        raise PlanError(_nothing(case, options, batch))
    fitting.sort(key=lambda each: each.seconds)
    alike = [each for each in fitting if each.seconds <= (1.0 + ALIKE) * fitting[0].seconds]
    rows = case.shape.sequence_length
    alike.sort(
        key=lambda each: (
            each.layout.offload != "none",
            each.layout.axes_used,
            each.layout.zero == 3,
            -min(ENOUGH_TOKENS, rows * each.layout.micro_batch),
            each.memory.total,
        )
    )
    fitting = alike[:1] + [each for each in fitting if each is not alike[0]] if alike else []
    why = tuple(reasons(strategies, fitting[0], room)) if fitting else ()
    if fitting and isinstance(case, Case):
        why += tuple(grid_reasons(case, fitting[0].layout))
    return Found(tuple(fitting), smallest, tried, why)


def _nothing(case: Case | ImageCase, options: Options, batch: int) -> str:
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
