"""pack: on how few stages the layers fit once the lower ones are frozen, how to cut them, and into how many micro-batches.

    frozen 0    | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 |      4 stages,  2 replicas on 8 devices
    frozen 8    | 0 1 2 3 4 5 6 7 8 | 9 10 11 |          2 stages,  4 replicas: no stage holds more than the fullest did

PipeTransformer's AutoPipe (He et al., 2021) with an exact partition in place of a greedy one. A pure function: whoever calls it
with the same numbers, on whatever rank, is answered the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyops.pipeline import Costs, LayerCosts, Profile, balance, schedule, simulate

__all__ = ["Machine", "Packing", "pack"]

POLICIES = ("global", "replica")
MEASURES = ("parameters", "memory")
MULTIPLES = (1, 2, 3, 4, 6, 8)  # of the number of stages, that are tried as numbers of micro-batches


@dataclass(frozen=True)
class Packing:
    """What `pack` found. boundaries: stage s holds layers [boundaries[s], boundaries[s + 1]). fullest: what the fullest stage
    holds, in the unit of the costs. time: of a step, simulated. reason: why not fewer stages, in words."""

    frozen: int
    stages: int
    boundaries: tuple[int, ...]
    micro_batches: int
    replicas: int
    reason: str
    fullest: float
    time: float


@dataclass(frozen=True)
class Machine:
    """What a step costs besides the layers. devices: of all replicas together. overhead: seconds that a micro-batch costs a
    stage in forward, and again in backward, however small it is. latency, bandwidth (bytes a second): from a stage to the next.
    reduce_bandwidth: of a ring over the replicas, for gradients."""

    devices: int
    overhead: float = 0.0
    latency: float = 0.0
    bandwidth: float = math.inf
    reduce_bandwidth: float = math.inf


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
    """Layers with `frozen` of them frozen, and all that does not change with the number of stages."""

    profile: Profile
    by: str
    held: tuple[float, ...]  # with by="parameters": of each layer, as a stage holds it
    machine: Machine
    batch: int
    profiled: float
    starting: int  # stages
    policy: str
    name: str  # of the schedule
    tied: dict[str, Any]

    def candidates(self, stages: int, most: float) -> Iterator[_Candidate]:
        """One for each number of micro-batches with which no stage holds more than that."""
        batch = self.batch * stages / self.starting if self.policy == "global" else float(self.batch)
        counts = [n * stages for n in MULTIPLES if n * stages <= batch] or [max(1, int(batch))]
        if self.by == "parameters":
            bounds = balance(self.held, num_stages=stages, **self.tied)
            fullest = max(math.fsum(self.held[a:b]) for _, a, b in _stages(bounds))
            if fullest <= most:
                yield from (
                    _Candidate(stages, count, batch / count / self.profiled, tuple(bounds), fullest) for count in counts
                )
            return
        for count in counts:
            made, scale = schedule(self.name, num_stages=stages, num_microbatches=count), batch / count / self.profiled
            flights = [made.peak(rank) * scale for rank in range(stages)]
            limit: dict[str, Any] = {} if math.isinf(most) else {"in_flight": flights, "most_bytes": most}
            try:
                bounds = balance(self.profile, num_stages=stages, by="time", **limit, **self.tied)
            except ValueError:
                if not limit:
                    raise
                continue
            fullest = max(self.profile.weights(a, b) + flights[s] * self.profile.kept(a, b) for s, a, b in _stages(bounds))
            yield _Candidate(stages, count, scale, tuple(bounds), fullest)

    def fits(self, stages: int, most: float = math.inf) -> bool:
        """Whether there is any."""
        return next(self.candidates(stages, most), None) is not None

    def best(self, stages: int, most: float = math.inf) -> tuple[float, _Candidate]:
        """The fastest, with the time of a step; of equally fast ones that with the fewest micro-batches."""
        timed = [(self._time(each), each) for each in self.candidates(stages, most)]
        least = min(time for time, _ in timed)
        return min((pair for pair in timed if pair[0] <= least * (1 + 1e-9)), key=lambda pair: pair[1].count)

    def _time(self, found: _Candidate) -> float:
        """Seconds of a step: the pipeline's, and the reduction of each stage's gradients behind its last backward."""
        machine, scale, ranks = self.machine, found.scale, range(found.stages)
        made = schedule(self.name, num_stages=found.stages, num_microbatches=found.count)
        once = self.profile.costs(found.boundaries, split=made.splits_backward)
        learns = [any(layer.backward for layer in self.profile.layers[a:b]) for _, a, b in _stages(found.boundaries)]
        costs = Costs(
            forward=[machine.overhead + scale * once.of("forward", s) for s in ranks],
            input_gradient=[machine.overhead * learns[s] + scale * once.of("input_gradient", s) for s in ranks],
            weight_gradient=[scale * once.of("weight_gradient", s) for s in ranks],
            activation=[scale * once.of("activation", s) for s in ranks],
            latency=machine.latency, bandwidth=machine.bandwidth,
        )  # fmt: skip
        ends = [0.0] * found.stages
        for action, (_, end) in simulate(made, costs).actions.items():
            ends[action.stage] = max(ends[action.stage], end)
        replicas = machine.devices // found.stages
        share = 2.0 * (replicas - 1) / replicas / machine.reduce_bandwidth
        return max(ends[s] + share * self._gradients(a, b) for s, a, b in _stages(found.boundaries))

    def _gradients(self, first: int, end: int) -> int:
        """Bytes."""
        return sum(dict(pair for layer in self.profile.layers[first:end] if layer.backward for pair in layer.weights).values())


def pack(
    costs: Profile | Sequence[float], *, frozen: int, stages: int, machine: Machine | None = None, by: str = "parameters",
    lambda_frozen: float | None = 1 / 6, ceiling: float | None = None, batch: int | None = None, profiled: float = 1.0,
    batch_policy: str = "global", schedule: str = "1f1b", together: Iterable[tuple[int, int]] = (),
    same_stage: Iterable[Sequence[int]] = (), cached: bool = False, fewest: int = 1,
) -> Packing:  # fmt: skip
    """Halve the number of stages as often as the fullest stage then holds no more than the fullest did at the start.

    costs: of the pipeline's layers, embedding and head included: a Profile, or numbers, which say both what a layer holds and
        what it takes, a third of it in forward. A cut never goes through a layer, so give a residual's layers as one.
    frozen: how many of the first layers. stages: at the start, with nothing frozen. machine: default: `stages` devices.
    by: "parameters": a stage holds its parameters (for numbers: these), and layers are cut so that the fullest holds the least,
        as in the paper. "memory", of a Profile: weights, gradients, Adam's moments, and activations of the micro-batches that
        the schedule keeps; layers are cut so that the slowest stage is the fastest of those that fit.
    lambda_frozen: what a frozen layer holds, of what it holds when active. None, with by="memory": as the profile says: its
        weights, no gradients, no activations. Its time is that of its forward, whatever lambda_frozen is; with `cached` none.
    ceiling: what a stage may hold at most (default: what the fullest holds at the start).
    batch: samples a step of one pipeline at the start (default: 8 for each stage), of which `profiled` were in the micro-batch
        that the costs are of. The number of micro-batches is a multiple K ... 8K of the stages, up to the batch: that with the
        shortest simulated step of the batch, so that smaller micro-batches are shorter, but for machine.overhead.
    batch_policy: "global": the batch of all replicas together stays; "replica": that of each stays, and the whole grows.
    schedule: of pyops.pipeline. together, same_stage: as for `balance`. fewest: not fewer stages than this.

    Frozen layers may be cut, and a stage have frozen layers alone; it computes forward only. It comes to that only where fewer
    stages would not fit: with everything but the head frozen and all of it in one stage's reach, one stage is what is left.
    ValueError: all layers frozen, fewer layers than stages, devices that the stages do not divide, nothing that fits a ceiling.
    """
    machine = machine or Machine(devices=stages)
    batch = 8 * stages if batch is None else batch
    numbers = not isinstance(costs, Profile)
    profile = costs if isinstance(costs, Profile) else _as_profile(costs)
    _check(profile, frozen, stages, machine, by, lambda_frozen, batch, profiled, batch_policy, numbers)
    tied = {"together": tuple(together), "same_stage": tuple(tuple(group) for group in same_stage)}
    held = tuple(map(float, costs)) if not isinstance(costs, Profile) else tuple(float(x.parameters) for x in costs.layers)
    problem = _Problem(profile, by, held, machine, batch, profiled, stages, batch_policy, schedule, tied)
    if ceiling is None:
        ceiling = next(problem.candidates(stages, math.inf)).fullest if by == "parameters" else problem.best(stages)[1].fullest
    share = 1.0 if lambda_frozen is None else lambda_frozen
    problem = replace(
        problem, profile=_frozen(profile, frozen, lambda_frozen, cached),
        held=tuple(x * share if i < frozen else x for i, x in enumerate(held)),
    )  # fmt: skip
    if not problem.fits(stages, ceiling):
        raise ValueError(f"{stages} stages don't fit the ceiling of {ceiling:.4g}; take more stages, or a higher ceiling")
    while stages % 2 == 0 and stages // 2 >= fewest and problem.fits(stages // 2, ceiling):
        stages //= 2
    time, found = problem.best(stages, ceiling)
    if stages == 1:
        reason = f"all fits on one stage, which holds {found.fullest:.4g} of at most {ceiling:.4g}"
    elif stages % 2:
        reason = f"{stages} stages can't be halved"
    elif stages // 2 < fewest:
        reason = f"{fewest} stages or more are asked for"
    else:
        reason = f"on {stages // 2} stages one would hold more than {ceiling:.4g}"
    if idle := sum(end <= frozen for end in found.boundaries[1:]):
        reason += f"; {idle} of the stages hold{'s' if idle == 1 else ''} frozen layers alone"
    replicas = machine.devices // stages
    return Packing(frozen, stages, found.boundaries, found.count, replicas, reason, found.fullest, time)


def _stages(bounds: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    return ((s, a, b) for s, (a, b) in enumerate(itertools.pairwise(bounds)))


def _as_profile(costs: Sequence[float]) -> Profile:
    third = [float(cost) / 3 for cost in costs]
    return Profile(tuple(
        LayerCosts(forward=t, backward=2 * t, forward_apart=t, input_gradient=t, weight_gradient=t) for t in third
    ))  # fmt: skip


def _frozen(profile: Profile, frozen: int, share: float | None, cached: bool) -> Profile:
    """With the first layers frozen: no backward, and held as `share` says. The others as they are."""
    layers = list(profile.layers)
    for i, layer in enumerate(layers[:frozen]):
        none: dict[str, Any] = {"backward": 0.0, "input_gradient": 0.0, "weight_gradient": 0.0, "put_off": 0}
        if share is None:  # Profile.weights counts a gradient for each weight, and moments for each parameter
            holds: dict[str, Any] = {"kept": (), "parameters": 0, "weights": tuple((n, size // 2) for n, size in layer.weights)}
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
    profile: Profile, frozen: int, stages: int, machine: Machine, by: str, share: float | None, batch: int, profiled: float,
    policy: str, numbers: bool,
) -> None:  # fmt: skip
    for what, value in (("stages", stages), ("machine.devices", machine.devices), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number, 1 or more")
    if machine.devices % stages:
        raise ValueError(
            f"{machine.devices} devices can't be shared out to pipelines of {stages} stages; make one divide the other"
        )
    if isinstance(frozen, bool) or not isinstance(frozen, int) or not 0 <= frozen < len(profile):
        raise ValueError(
            f"frozen is {frozen!r} of {len(profile)} layers; it must be a whole number from 0 to {len(profile) - 1}: with all "
            "frozen there is nothing to train"
        )
    if by not in MEASURES or policy not in POLICIES:
        raise ValueError(
            f"by is {by!r}, batch_policy {policy!r}; choose of {', '.join(MEASURES)}, and of {', '.join(POLICIES)}"
        )
    if by == "memory" and numbers:
        raise ValueError('by="memory" needs to know what layers keep; give a Profile: profile(layers, inputs)')
    if share is None and by == "parameters":
        raise ValueError(
            'lambda_frozen=None is what a profile measured, and goes with by="memory"; give a number, such as 1 / 6'
        )
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"lambda_frozen is {share!r}; expected a number from 0 to 1")
    if not profiled > 0 or not min(machine.overhead, machine.latency) >= 0 or not machine.reduce_bandwidth > 0:
        raise ValueError(f"profiled is {profiled!r}, and the machine {machine}; seconds are 0 or more, the others more than 0")
