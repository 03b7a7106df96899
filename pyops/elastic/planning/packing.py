"""pack: on how few stages the layers fit once the lower ones are frozen, how to cut them, and into
how many micro-batches.

    frozen 0    | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 |   4 stages,  2 replicas on 8 devices
    frozen 8    |(0 1 2 3 4 5 6 7) 8 | 9 10 11 |      2 stages,  4 replicas: no stage holds more
                                                                 than the fullest did
    frozen 11   |(0 1 2 3 4 5 6 7 8 9 10) 11 |        1 stage,   8 replicas: the head alone learns

PipeTransformer's AutoPipe (He et al., 2021) with an exact partition in place of a greedy one. What
is frozen is one module on the first stage. A pure function: whoever calls it with the same numbers,
on whatever rank, is answered the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyops.elastic.planning.packing_config import RENAMED, Machine, PackingConfig
from pyops.pipeline import Costs, LayerCosts, Profile, balance, schedule, simulate
from pyops.pipeline.partition.balance import stage_starts
from pyops.renamed import refuse_renamed

__all__ = ["Machine", "Packing", "frozen_share", "pack"]

MULTIPLES = (
    1,
    2,
    3,
    4,
    6,
    8,
)  # of the number of stages, that are tried as numbers of micro-batches


@dataclass(frozen=True)
class Packing:
    """What `pack` found."""

    frozen: int
    """How many of the first layers are frozen."""

    stages: int
    """Pipeline stages of a replica."""

    boundaries: tuple[int, ...]
    """Stage s holds layers [boundaries[s], boundaries[s + 1])."""

    micro_batches: int
    """Micro-batches of a replica's step."""

    replicas: int
    """Pipelines that the devices have room for."""

    reason: str
    """Why there are not fewer stages, in words."""

    fullest: float
    """What the fullest stage holds, in the unit of the costs."""

    time: float
    """Simulated seconds of a step."""

    simulated: tuple[tuple[int, float], ...] = ()
    """(number of micro-batches, time) of all numbers that these boundaries were tried with, the
    fastest first."""


@dataclass(frozen=True)
class _Candidate:
    """scale: micro-batches as profiled that make one of these."""

    stages: int
    count: int
    scale: float
    boundaries: tuple[int, ...]
    fullest: float


@dataclass(frozen=True)
class _Problem:
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

    def candidates(self, stages: int, most: float) -> Iterator[_Candidate]:
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
                    _Candidate(
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
            yield _Candidate(stages, count, scale, tuple(bounds), fullest)

    def fits(self, stages: int, most: float = math.inf) -> bool:
        """Whether there is any."""
        return stages <= self.places and next(self.candidates(stages, most), None) is not None

    def best(self, stages: int, most: float = math.inf) -> list[tuple[float, _Candidate]]:
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

    def _time(self, found: _Candidate) -> float:
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


def pack(
    costs: Profile | Sequence[float],
    *,
    frozen: int,
    stages: int,
    batch: int | None = None,
    cached: bool = False,
    min_stages: int = 1,
    config: PackingConfig | None = None,
    **renamed: Any,
) -> Packing:
    """Halve the number of stages as often as the fullest stage then holds no more than the fullest
    did at the start.

    An odd number of stages goes to one in place of its half. Where freezing leaves fewer layers
    than stages there are fewer of these, whatever `min_stages` says. With everything but the head
    frozen there is one, if no ceiling that is given forbids it. The number of micro-batches is a
    multiple K ... 8K of the stages, up to the batch: that with the shortest simulated step, so that
    smaller micro-batches are shorter, but for machine.overhead.

    Args:
        costs: of the pipeline's layers, embedding and head included: a Profile, or numbers, which
            say both what a layer holds and how long it takes, a third of it in forward. A cut never
            goes through a layer, so give a residual's layers as one.
        frozen: how many of the first layers are frozen; stage 0 has them all.
        stages: of each pipeline at the start, with nothing frozen.
        batch: samples a step of one pipeline at the start; None: 8 for each stage.
        cached: whether the frozen layers' output is read, so that they take no time.
        min_stages: the min_stages stages.
        config: how layers are packed; None: PackingConfig().

    Raises:
        ValueError: for all layers frozen, fewer layers than stages at the start, devices that the
            stages do not divide, or a ceiling that no number of stages fits.
    """
    refuse_renamed("pack", renamed, RENAMED)
    config = config or PackingConfig()
    batch = 8 * stages if batch is None else batch
    profile = costs if isinstance(costs, Profile) else _as_profile(costs)
    machine = _check(profile, frozen, stages, batch, config, not isinstance(costs, Profile))
    by, lambda_frozen, ceiling = config.by, config.lambda_frozen, config.ceiling
    tied = {
        "together": tuple(config.together),
        "same_stage": tuple(tuple(group) for group in config.same_stage),
    }
    held = (
        tuple(map(float, costs))
        if not isinstance(costs, Profile)
        else tuple(float(x.parameters) for x in costs.layers)
    )
    start = _Problem(profile, held, config, machine, batch, stages, tied)
    if lambda_frozen is None and by == "parameters":
        lambda_frozen = frozen_share(profile)
    share = 1.0 if lambda_frozen is None else lambda_frozen
    problem = replace(
        start,
        profile=_frozen(profile, frozen, lambda_frozen, cached),
        held=tuple(x * share if i < frozen else x for i, x in enumerate(held)),
        tied={**tied, "together": (*tied["together"], (0, max(0, frozen - 1)))},
    )
    several = _numbers_of_stages(stages)
    enough = [n for n in several if min_stages <= n <= problem.places] or [
        n for n in several if n <= problem.places
    ][:1]
    most, last = (
        math.inf if ceiling is None else ceiling,
        frozen + config.head >= len(profile),
    )  # last: the head alone learns
    if last and ceiling is None and min_stages == 1:
        enough = [1]
    elif ceiling is None:
        at_start = start.least(stages) if by == "parameters" else start.best(stages)[0][1].fullest
        most = max(at_start, min(problem.least(n) for n in enough))
    fitting = [n for n in enough if problem.fits(n, most)]
    if not fitting:
        raise ValueError(
            f"{' or '.join(map(str, enough))} stage{'s' * (enough != [1])} don't fit the "
            f"ceiling of {most:.4g}, with {frozen} "
            "frozen layers on the first; take more stages, or a higher ceiling"
        )
    timed = problem.best(fitting[-1], most)
    time, found = timed[0]
    return Packing(
        frozen,
        found.stages,
        found.boundaries,
        found.count,
        problem.replicas(found.stages),
        _reason(problem, found, frozen, most, min_stages, last),
        found.fullest,
        time,
        tuple((each.count, seconds) for seconds, each in timed),
    )


def frozen_share(profile: Profile, *, in_flight: float = 1.0) -> float:
    """lambda_frozen as it was measured: bytes of all layers when frozen, which are weights, of
    those when active: weights, gradients, Adam's moments, and what they keep of so many
    micro-batches for backward."""
    active = profile.weights(0, len(profile)) + in_flight * profile.kept(0, len(profile))
    frozen = _frozen(profile, len(profile), None, cached=False)
    return frozen.weights(0, len(profile)) / active if active else 0.0


def _numbers_of_stages(starting: int) -> list[int]:
    """Halved as often as it goes; an odd number goes to 1."""
    found = [starting]
    while found[-1] > 1:
        found.append(found[-1] // 2 if found[-1] % 2 == 0 else 1)
    return found


def _reason(
    problem: _Problem, found: _Candidate, frozen: int, most: float, min_stages: int, last: bool
) -> str:
    """Why not fewer stages, in words."""
    stages, following = found.stages, [*_numbers_of_stages(found.stages), 1][1]
    if last and stages == 1:
        reason = f"the head alone learns, so one stage has all, which is {found.fullest:.4g}"
    elif stages == 1:
        reason = f"all fits on one stage, which holds {found.fullest:.4g} of at most {most:.4g}"
    elif stages < min_stages:
        reason = (
            f"{min_stages} stages or more are asked for, but there are {problem.places} parts, "
            "what is frozen being one"
        )
    elif following < min_stages:
        reason = f"{min_stages} stages or more are asked for"
    else:
        reason = (
            f"on {following} stage{'s' if following > 1 else ''} one would hold more than "
            f"{most:.4g}"
        )
    return (
        f"{reason}; the first stage has frozen layers alone"
        if found.boundaries[1] <= frozen
        else reason
    )


def _stages(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return ((s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))


def _as_profile(costs: Sequence[float]) -> Profile:
    third = [float(cost) / 3 for cost in costs]
    return Profile(
        tuple(
            LayerCosts(
                forward=t, backward=2 * t, forward_apart=t, input_gradient=t, weight_gradient=t
            )
            for t in third
        )
    )


def _frozen(profile: Profile, frozen: int, share: float | None, cached: bool) -> Profile:
    """With the first layers frozen: no backward, and held as `share` says. The others as they
    are."""
    layers = list(profile.layers)
    for i, layer in enumerate(layers[:frozen]):
        none: dict[str, Any] = {
            "backward": 0.0,
            "input_gradient": 0.0,
            "weight_gradient": 0.0,
            "deferred_weight_grad": 0,
        }
        if (
            share is None
        ):  # Profile.weights counts a gradient for each weight, and moments for each parameter
            holds: dict[str, Any] = {
                "kept": (),
                "parameters": 0,
                "weights": tuple((n, size // 2) for n, size in layer.weights),
            }
        else:
            holds = {
                "parameters": round(share * layer.parameters),
                "kept": tuple((n, round(share * size)) for n, size in layer.kept),
                "weights": tuple((n, round(share * size)) for n, size in layer.weights),
            }
        forward: dict[str, Any] = {"forward": 0.0, "forward_apart": 0.0} if cached else {}
        layers[i] = replace(layer, **none, **holds, **forward)
    return replace(profile, layers=tuple(layers))


def _check(
    profile: Profile, frozen: int, stages: int, batch: int, config: PackingConfig, numbers: bool
) -> Machine:
    """The machine. ValueError for what `pack` can't be asked."""
    devices = stages if config.machine is None else config.machine.devices
    for what, value in (("stages", stages), ("machine.devices", devices), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
    if devices % stages:
        raise ValueError(
            f"machine.devices is {devices}, and {devices} devices can't be shared out to pipelines "
            f"of {stages} stages; make one divide the other"
        )
    if isinstance(frozen, bool) or not isinstance(frozen, int) or not 0 <= frozen < len(profile):
        raise ValueError(
            f"frozen is {frozen!r} of {len(profile)} layers; it must be a whole number from 0 to "
            f"{len(profile) - 1}: with all frozen there is nothing to train"
        )
    return config.check(stages=stages, numbers=numbers)
