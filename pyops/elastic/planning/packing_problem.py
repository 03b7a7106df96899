"""PackingProblem: the layers of a model, some of them frozen, and the cuts of them into a given
number of stages, each with the simulated time of its step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyops.elastic.planning.packing_config import Machine, PackingConfig
from pyops.pipeline import Costs, Profile, balance, schedule, simulate
from pyops.pipeline.partition.balance import stage_starts

__all__ = ["Candidate", "PackingProblem"]

# Multiples of the number of stages that are tried as numbers of micro-batches.
MULTIPLES = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True)
class Candidate:
    """A cut into stages, with a number of micro-batches."""

    stages: int
    """Of a replica."""
    count: int
    """Micro-batches of a replica's step."""
    scale: float
    """Micro-batches as profiled that make one of these."""
    boundaries: tuple[int, ...]
    """Stage s holds layers [boundaries[s], boundaries[s + 1])."""
    fullest: float
    """What the fullest stage holds, in the unit of the costs."""


@dataclass(frozen=True)
class PackingProblem:
    """Layers with `frozen` of them frozen, and all that does not change with the number of
    stages."""

    profile: Profile
    held: tuple[float, ...]  # with by="parameters": of each layer, as a stage holds it
    config: PackingConfig
    machine: Machine
    batch: int
    starting: int  # stages
    tied: dict[str, Any]

    @property
    def places(self) -> int:
        """The most stages that there are layers for."""
        return len(stage_starts(len(self.profile), **self.tied))

    def replicas(self, stages: int) -> int:
        """Pipelines of so many stages."""
        return self.machine.devices // (stages if self.config.replicate else self.starting)

    def candidates(self, stages: int, most: float) -> Iterator[Candidate]:
        """One for each number of micro-batches with which no stage holds more than that."""
        batch = float(self.batch)
        if self.config.batch_policy == "global":
            batch *= self.replicas(self.starting) / self.replicas(stages)
        counts = [n * stages for n in MULTIPLES if n * stages <= batch] or [max(1, int(batch))]
        if self.config.by == "parameters":
            bounds = balance(self.held, num_stages=stages, **self.tied)
            fullest = max(math.fsum(self.held[a:b]) for _, a, b in _stages(bounds))
            if fullest <= most:
                yield from (
                    Candidate(
                        stages, count, batch / count / self.config.profiled, tuple(bounds), fullest
                    )
                    for count in counts
                )
            return
        for count in counts:
            made, scale = (
                schedule(self.config.schedule, num_stages=stages, num_microbatches=count),
                batch / count / self.config.profiled,
            )
            flights = [made.peak(rank) * scale for rank in range(stages)]
            limit: dict[str, Any] = (
                {} if math.isinf(most) else {"in_flight": flights, "most_bytes": most}
            )
            try:
                bounds = balance(self.profile, num_stages=stages, by="time", **limit, **self.tied)
            except ValueError:
                if not limit:
                    raise
                continue
            fullest = max(
                self.profile.weights(a, b) + flights[s] * self.profile.kept(a, b)
                for s, a, b in _stages(bounds)
            )
            yield Candidate(stages, count, scale, tuple(bounds), fullest)

    def fits(self, stages: int, most: float = math.inf) -> bool:
        """Whether there is any."""
        return stages <= self.places and next(self.candidates(stages, most), None) is not None

    def best(self, stages: int, most: float = math.inf) -> list[tuple[float, Candidate]]:
        """With the time of a step, from the fastest on those of its boundaries; of equally fast
        ones, the min_stages micro-batches come first."""
        timed = [(self._time(each), each) for each in self.candidates(stages, most)]
        least = min(time for time, _ in timed)
        first = min(
            (pair for pair in timed if pair[0] <= least * (1 + 1e-9)),
            key=lambda pair: pair[1].count,
        )
        others = [
            pair
            for pair in timed
            if pair[1].boundaries == first[1].boundaries and pair[1] is not first[1]
        ]
        return [first, *sorted(others, key=lambda pair: (pair[0], pair[1].count))]

    def least(self, stages: int) -> float:
        """What the fullest holds, where nothing limits it."""
        return min(found.fullest for found in self.candidates(stages, math.inf))

    def _time(self, found: Candidate) -> float:
        """Seconds of a step: the pipeline's, and the reduction of each stage's gradients behind its
        last backward."""
        machine, scale, ranks = self.machine, found.scale, range(found.stages)
        made = schedule(self.config.schedule, num_stages=found.stages, num_microbatches=found.count)
        once = self.profile.costs(found.boundaries, split=made.splits_backward)
        learns = [
            any(layer.backward for layer in self.profile.layers[a:b])
            for _, a, b in _stages(found.boundaries)
        ]
        costs = Costs(
            forward=[machine.overhead + scale * once.of("forward", s) for s in ranks],
            input_gradient=[
                machine.overhead * learns[s] + scale * once.of("input_gradient", s) for s in ranks
            ],
            weight_gradient=[scale * once.of("weight_gradient", s) for s in ranks],
            activation=[scale * once.of("activation", s) for s in ranks],
            latency=machine.latency,
            bandwidth=machine.bandwidth,
        )
        ends = [0.0] * found.stages
        for action, (_, end) in simulate(made, costs).actions.items():
            ends[action.stage] = max(ends[action.stage], end)
        replicas = self.replicas(found.stages)
        share = 2.0 * (replicas - 1) / replicas / machine.reduce_bandwidth
        return max(ends[s] + share * self._gradients(a, b) for s, a, b in _stages(found.boundaries))

    def _gradients(self, first: int, end: int) -> int:
        """Bytes."""
        return sum(
            dict(
                pair
                for layer in self.profile.layers[first:end]
                if layer.backward
                for pair in layer.weights
            ).values()
        )


def _stages(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return ((s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))
