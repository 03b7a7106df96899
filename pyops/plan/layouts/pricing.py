"""Priced: a layout with the memory and the time that it takes."""

from __future__ import annotations

from dataclasses import dataclass

from pyops.plan.clusters import GIB
from pyops.plan.costs.computing import Case
from pyops.plan.costs.images import ImageCase, image_memory, image_step
from pyops.plan.costs.rank_memory import Memory, host_bytes, memory
from pyops.plan.costs.times import StepTime, step_time
from pyops.plan.layout import Layout
from pyops.plan.layouts.options import Options

__all__ = ["Priced", "price", "room_of"]


@dataclass(frozen=True)
class Priced:
    """A layout with what it takes."""

    layout: Layout
    """How the training is shared out."""
    memory: Memory
    """Bytes of a rank."""
    time: StepTime
    """Seconds of a step, predicted."""
    measured: float = 0.0
    """Seconds of a step, where it was tried; else 0."""

    @property
    def seconds(self) -> float:
        """Of a step: predicted, or measured where it was tried."""
        return self.measured or self.time.total


def room_of(case: Case | ImageCase, options: Options) -> float:
    """Bytes of a device that may be used."""
    return options.memory_part * case.cluster.device.memory_gib * GIB


def price(case: Case | ImageCase, options: Options, layout: Layout) -> Priced:
    """What a layout takes; its time is left out where it does not fit.

    Args:
        case: The model, the cluster, the program.
        options: The optimizer, and the part of the memory that may be used.
        layout: How the training is shared out.
    """
    if isinstance(case, ImageCase):
        room = room_of(case, options)
        taken = image_memory(case, layout, optimizer_bytes=options.optimizer_bytes)
        fits = taken.total <= room
        return Priced(layout, taken, image_step(case, layout) if fits else StepTime())
    taken = memory(
        case.shape,
        layout,
        case.software,
        precision=case.precision,
        device=case.cluster.device,
        optimizer_bytes=options.optimizer_bytes,
    )
    fits = taken.total <= room_of(case, options)
    if layout.offload != "none":
        host = case.cluster.host
        there = 0.0 if host is None else host.memory_gib * GIB
        fits = fits and host_bytes(case.shape, layout, options.optimizer_bytes) <= there
    return Priced(layout, taken, step_time(case, layout) if fits else StepTime())
