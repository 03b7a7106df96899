"""forecast: what each epoch of a run with freezing would take, from the policy, the packing and the
pipeline's simulator.

    epoch            0  1  2  3   4  ...
    frozen blocks    0  4  7  9  10
    stages           8  8  4  2   2
    replicas         2  2  4  8   8

Nothing is run or measured. The cost of a change of layout, of evaluation and of reading data or a
cache is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pyops.elastic.planning.packing import Packing, pack
from pyops.elastic.planning.packing_config import PackingConfig
from pyops.elastic.policy.freeze_policies import Policy
from pyops.pipeline import Profile

__all__ = ["Epoch", "ForecastRun", "forecast"]


@dataclass(frozen=True)
class Epoch:
    """One epoch of a forecast."""

    frozen: int
    """How many blocks are frozen."""

    packing: Packing
    """The layout."""

    cached: bool
    """Whether the frozen blocks' output is read from a cache."""

    seconds: float
    """Of all its steps."""


@dataclass(frozen=True, kw_only=True)
class ForecastRun:
    """The run that is forecast."""

    epochs: int
    """How many epochs it has."""

    samples: int
    """Samples of an epoch."""

    batch: int
    """Samples a step of one pipeline at the start."""

    stages: int
    """Stages of a pipeline at the start."""

    blocks: int
    """How many blocks the policy may freeze."""

    layers_of: Callable[[int], int]
    """How many pipeline layers are frozen with n > 0 of the blocks."""

    norms: Sequence[Sequence[float]] | None = None
    """Recorded gradient norms of each epoch's blocks; None: such that the gradient rule is as fast
    as its bound."""

    cached_from: int | None = None
    """With so many blocks frozen or more their output is read from a cache, at no cost; None:
    never."""

    compress: bool = True
    """False: as many stages as at the start, if there are layers for them."""


def forecast(
    costs: Profile | Sequence[float],
    *,
    policy: Policy | None,
    run: ForecastRun,
    packing: PackingConfig | None = None,
) -> tuple[Epoch, ...]:
    """One entry for each epoch, at whose end the policy decides.

    Args:
        costs: as for `pack`.
        policy: decides what is frozen; None freezes nothing.
        run: the run that is forecast.
        packing: options of `pack`, among them the machine.

    Raises:
        ValueError: where `pack` raises one, and for norms of fewer epochs.
    """
    if run.norms is not None and len(run.norms) < run.epochs:
        raise ValueError(
            f"norms are of {len(run.norms)} epochs, but epochs is {run.epochs}; give the norms of "
            "each"
        )
    packing = packing or PackingConfig()
    devices = run.stages if packing.machine is None else packing.machine.devices
    found: list[Epoch] = []
    known: dict[tuple[int, bool], Packing] = {}
    frozen = 0
    for epoch in range(run.epochs):
        cached = run.cached_from is not None and frozen >= run.cached_from
        if (frozen, cached) not in known:
            known[frozen, cached] = pack(
                costs,
                frozen=run.layers_of(frozen) if frozen else 0,
                stages=run.stages,
                batch=run.batch,
                cached=cached,
                min_stages=1 if run.compress else run.stages,
                config=packing,
            )
        packed = known[frozen, cached]
        replicas = devices // run.stages if packing.batch_policy == "global" else packed.replicas
        steps = run.samples / (run.batch * replicas)
        found.append(Epoch(frozen, packed, cached, steps * packed.time))
        if policy is not None:
            norms = range(run.blocks, 0, -1) if run.norms is None else run.norms[epoch]
            frozen = policy.decide(norms, frozen)
    return tuple(found)
