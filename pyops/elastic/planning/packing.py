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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyops.elastic.planning.packing_config import RENAMED, Machine, PackingConfig
from pyops.elastic.planning.packing_problem import Candidate, PackingProblem
from pyops.pipeline import LayerCosts, Profile
from pyops.renamed import refuse_renamed

__all__ = ["Machine", "Packing", "frozen_share", "pack"]


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
    start = PackingProblem(profile, held, config, machine, batch, stages, tied)
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
    problem: PackingProblem, found: Candidate, frozen: int, most: float, min_stages: int, last: bool
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
