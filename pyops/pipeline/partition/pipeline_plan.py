"""PipelinePlan: stages of layers, each on one or several devices; what the planners give, and the
cluster that they are given.

layers 0-9 on 6 devices | 10-11 on 2   PipelinePlan(boundaries=[0, 10, 12], replicas=(6, 2))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Levels", "PipelinePlan", "PlannedStage", "check_levels", "ring"]

# How many parts a whole has, and the bytes a second between them, from the innermost: [(8, 3e11),
# (2, 1e10)] are two machines of eight devices.
Levels = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class PlannedStage:
    """Layers [first, end) on so many replicas, which share out micro-batches or their samples.

    Attributes:
        machines: {machine: devices}, of a plan that says where stages are.
    """

    first: int
    end: int
    replicas: int
    machines: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PipelinePlan:
    """time: seconds, of what the planner's model says it takes."""

    stages: tuple[PlannedStage, ...]
    time: float

    @property
    def boundaries(self) -> list[int]:
        """As `balance` gives them."""
        return [stage.first for stage in self.stages] + [self.stages[-1].end]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def in_flight(self) -> int:
        """Micro-batches that fill the pipeline, those of one replica of the first stage: all
        devices over its replicas."""
        return math.ceil(sum(self.replicas) / self.stages[0].replicas)

    def __str__(self) -> str:
        parts = [
            f"{s.first}{f'-{s.end - 1}' if s.end - 1 > s.first else ''} on {s.replicas}"
            for s in self.stages
        ]
        return f"layers {' | '.join(parts)}: {self.time:.4g} s"


def check_levels(levels: Levels, *, most: int | None = None) -> None:
    """ValueError for levels that are none."""
    if not levels or (most is not None and len(levels) > most):
        raise ValueError(
            f"levels is {levels!r}; give {f'1 to {most}' if most else 'one or more'} "
            "pairs (parts, bytes a second)"
        )
    for count, bandwidth in levels:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1 or not bandwidth > 0:
            raise ValueError(
                f"the level ({count!r}, {bandwidth!r}) should be a whole number of parts "
                "and bytes a second above 0"
            )


def ring(size: float, ranks: int, bandwidth: float) -> float:
    """Seconds of a ring all-reduce of `size` bytes: each rank sends 2 (n - 1) / n of them."""
    return 2.0 * (ranks - 1) / ranks * size / bandwidth
