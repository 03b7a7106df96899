"""forecast: what each epoch of a run with freezing would take, from the policy, the packing and the
pipeline's simulator.

    epoch     0   1   2   3   4  ...        frozen blocks 0 4 7 9 10, stages 8 8 4 2 2, replicas 2 2 4 8 8, seconds ...

Nothing is run or measured. The cost of a change of layout, of evaluation and of reading data or a
cache is not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pyops.elastic.planning.packing import Machine, Packing, pack
from pyops.elastic.policy.policy import Policy
from pyops.pipeline import Profile

__all__ = ["Epoch", "forecast"]


@dataclass(frozen=True)
class Epoch:
    """frozen: blocks. cached: their output is read. seconds: of all its steps."""

    frozen: int
    packing: Packing
    cached: bool
    seconds: float


def forecast(
    costs: Profile | Sequence[float],
    *,
    policy: Policy | None,
    epochs: int,
    samples: int,
    blocks: int,
    layers_of: Callable[[int], int],
    stages: int,
    machine: Machine,
    batch: int,
    norms: Sequence[Sequence[float]] | None = None,
    compress: bool = True,
    replicate: bool = True,
    cached_from: int | None = None,
    batch_policy: str = "global",
    **options: Any,
) -> tuple[Epoch, ...]:
    """One entry for each epoch, at whose end the policy decides; None freezes nothing.

    costs, stages, machine, batch, batch_policy, options: as for `pack`. samples: of an epoch.
    blocks: how many the policy may
        freeze; layers_of(n): how many pipeline layers are frozen with n > 0 of them. norms: recorded, of each epoch's blocks;
        by default such that the gradient rule is as fast as its bound.
    compress: False: as many stages as at the start, if there are layers for them. replicate: False:
    devices set free stay idle. cached_from: with so many blocks frozen or more their output is read
    from a cache, at no cost.

    ValueError where `pack` raises one, and for norms of fewer epochs.
    """
    if norms is not None and len(norms) < epochs:
        raise ValueError(f"there are norms of {len(norms)} epochs, but {epochs} to forecast")
    settings: dict[str, Any] = {
        "stages": stages,
        "machine": machine,
        "batch": batch,
        "batch_policy": batch_policy,
        "replicate": replicate,
        "fewest": 1 if compress else stages,
        **options,
    }
    found: list[Epoch] = []
    known: dict[tuple[int, bool], Packing] = {}
    frozen = 0
    for epoch in range(epochs):
        cached = cached_from is not None and frozen >= cached_from
        if (frozen, cached) not in known:
            layers = layers_of(frozen) if frozen else 0
            known[frozen, cached] = pack(costs, frozen=layers, cached=cached, **settings)
        packing = known[frozen, cached]
        whole = batch * (
            machine.devices // stages if batch_policy == "global" else packing.replicas
        )
        found.append(Epoch(frozen, packing, cached, samples / whole * packing.time))
        if policy is not None:
            frozen = policy.decide(
                norms[epoch] if norms is not None else range(blocks, 0, -1), frozen
            )
    return tuple(found)
