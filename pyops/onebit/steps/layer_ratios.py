"""The compressed step of 1-bit LAMB: every layer by its kept trust ratio, and by how its variance
has changed since.

    g      = (m_t - beta1 m_(t-1)) / (1 - beta1)
    fresh  = beta2 fresh + (1 - beta2) g^2                       fresh = v at the switch
    factor = max over the layer of (sqrt(v) + eps) / (sqrt(fresh) + eps)
    u      = m / (sqrt(v) + eps) + wd p
    rho    = min(1, ||m / (sqrt(v) + eps)|| / ||u||)
    factor = rho factor + 1 - rho
    factor = within [factor_min, factor_max], and within factor_threshold of what it was a step ago
    p      = p - lr ratio factor u

m: as it came back from the ranks, in its own units. ratio: kept at the switch, per layer.

Li et al., 1-bit LAMB, arXiv:2104.06069, algorithm 1. Every number comes from what all ranks have in
common, by sums of a fixed order and operations that round once, so ranks agree in every bit;
nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from pyops.comm.buckets.grad_norm import squares_of_each
from pyops.flat import FlatLayout
from pyops.onebit.steps.frozen_variance_step import inverse_roots, step_frozen
from pyops.onebit.steps.state_slots import StateSlots
from pyops.optim.fused.layerwise import layout_of
from pyops.protocols import ParamGroup

__all__ = [
    "COLUMNS",
    "FACTOR",
    "RATIO",
    "SCALE",
    "WEIGHT",
    "LayerTrustRatios",
    "layer_slices",
]

# Columns of the table that a parameter has, a row per layer.
RATIO, WEIGHT, FACTOR, SCALE = range(4)
COLUMNS = 4


def layer_slices(parameter: Tensor) -> list[slice]:
    """Where the layers of a parameter lie in its flattened memory."""
    layout: FlatLayout | None = layout_of(parameter)
    if layout is None:
        return [slice(0, parameter.numel())]
    return [layout.slice_at(k) for k in range(len(layout.names))]


def _runs(slots: StateSlots, values: Sequence[float]) -> Iterator[tuple[slice, float]]:
    """Slices of a flat tensor over which a number per slot is the same."""
    for value, some in groupby(zip(slots, values, strict=True), key=lambda pair: pair[1]):
        run = [slot for slot, _ in some]
        yield slice(run[0].start, run[-1].stop), value


class LayerTrustRatios:
    """What stays as it is from the switch on, flat, and the step.

    Args:
        states: Of each parameter; exp_avg_sq is the kept variance, exp_avg_sq_fresh becomes a view
            of `fresh`.
        tables: Of each parameter, [layers, COLUMNS]; they become views of one table.
        precondition: Whether the momentum travels as m / (sqrt(v) + eps), or times a number per
            layer that makes the layers' sizes equal.
    """

    def __init__(
        self,
        slots: StateSlots,
        groups: Sequence[ParamGroup],
        states: Any,
        tables: dict[Tensor, Tensor],
        momentum: Tensor,
        *,
        precondition: bool,
        corrected: bool,
    ) -> None:
        self.slots, self.groups, self._corrected = slots, groups, corrected
        own = [states[slot.parameter] for slot in slots]
        self.slices = [
            slice(slot.start + part.start, slot.start + part.stop)
            for slot in slots
            for part in layer_slices(slot.parameter)
        ]
        counts = [len(layer_slices(slot.parameter)) for slot in slots]
        self.table = torch.cat([tables[slot.parameter] for slot in slots])
        for slot, part in zip(slots, self.table.split(counts), strict=True):
            tables[slot.parameter] = part
        self._layered = torch.tensor(
            [
                groups[slot.group]["trust_ratio"]
                for slot, count in zip(slots, counts, strict=True)
                for _ in range(count)
            ],
            device=momentum.device,
        )
        self._eps = [float(groups[slot.group]["eps"]) for slot in slots]
        inverse = inverse_roots(slots, [state["exp_avg_sq"] for state in own], self._eps)
        self._dead = inverse == 0
        self._denominators = _inverse(inverse)
        self.roots = inverse if precondition else self._equalise(momentum)
        self._to_gradient = self._denominators if precondition else _inverse(self.roots)
        self._to_update = None if precondition else self._to_gradient * inverse
        self.fresh = slots.gather(
            [state.get("exp_avg_sq_fresh", state["exp_avg_sq"]) for state in own]
        )
        for slot, state in zip(slots, own, strict=True):
            state["exp_avg_sq_fresh"] = slot.view(self.fresh)
        self._ones = torch.ones_like(momentum)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[part] for part in self.slices]

    def _equalise(self, momentum: Tensor) -> Tensor:
        """Flat: per layer, the mean size of all layers' momenta divided by that of its own; chosen
        once."""
        sizes = torch.tensor(
            [max(1, part.stop - part.start) for part in self.slices], device=momentum.device
        )
        rms = (squares_of_each(self._views(momentum)) / sizes).sqrt()
        chosen = torch.where(rms > 0, rms.mean() / rms, 1.0)
        scales = self.table[:, SCALE]
        scales.copy_(torch.where(scales > 0, scales, chosen))
        roots = torch.zeros_like(momentum)
        for view, scale in zip(self._views(roots), scales.float(), strict=True):
            view.copy_(scale)
        return roots.masked_fill_(self._dead, 0.0)

    def step(
        self,
        momentum: Tensor,
        before: Tensor,
        states: Any,
        *,
        betas: Sequence[float],
        decays: Sequence[float],
        bounds: tuple[float, float, float],
    ) -> None:
        """Move every parameter. momentum, before: flat, of this step and the last; overwrites
        `before`.

        Args:
            betas, decays: beta1 of the momentum and beta2 of `fresh`, per slot.
            bounds: factor_min, factor_max, factor_threshold.
        """
        largest = self._compare(momentum, before, betas, decays)
        update = momentum if self._to_update is None else momentum * self._to_update
        whole = self.slots.gather(
            [states[slot.parameter].get("master", slot.parameter.detach()) for slot in self.slots]
        )
        for run, decay in self._each(lambda group: float(group["weight_decay"])):
            whole[run].mul_(decay)
        whole.add_(update)
        scales = self._scales(
            largest,
            squares_of_each(self._views(update)),
            squares_of_each(self._views(whole)),
            *bounds,
        )
        for view, scale in zip(self._views(whole), scales, strict=True):
            view.mul_(scale)
        for g, group in enumerate(self.groups):
            rows = [
                (
                    slot.parameter,
                    slot.view(whole),
                    slot.view(self._ones),
                    states[slot.parameter],
                )
                for slot in self.slots
                if slot.group == g
            ]
            step_frozen(group, rows, eps=0.0, lr=group["lr"], weight_decay=0.0)

    def _each(self, value: Callable[[ParamGroup], float]) -> Iterator[tuple[slice, float]]:
        return _runs(self.slots, [value(self.groups[slot.group]) for slot in self.slots])

    def _compare(
        self, momentum: Tensor, before: Tensor, betas: Sequence[float], decays: Sequence[float]
    ) -> Tensor:
        """Take the gradient that came back into `fresh`; float64 [layers]: the largest quotient of
        roots, 0 if all is dead."""
        for run, beta in _runs(self.slots, betas):
            before[run].mul_(-beta).add_(momentum[run]).mul_(1 / (1 - beta))
        before.mul_(self._to_gradient)
        before.mul_(before)
        for run, decay in _runs(self.slots, decays):
            before[run].mul_(1 - decay)
            self.fresh[run].mul_(decay).add_(before[run])
        quotients = torch.sqrt(self.fresh, out=before)
        for run, eps in _runs(self.slots, self._eps):
            quotients[run].add_(eps)
        torch.div(self._denominators, quotients, out=quotients)
        quotients.masked_fill_(self._dead, 0.0)  # and padding, whose quotient is 0 / 0
        nothing = quotients.new_zeros(())
        return torch.stack(
            [view.amax() if view.numel() else nothing for view in self._views(quotients)]
        ).double()

    def _scales(
        self,
        largest: Tensor,
        squares: Tensor,
        whole: Tensor,
        least: float,
        most: float,
        threshold: float,
    ) -> Tensor:
        """fp32 [layers]: the kept ratio times the factor, which is also remembered."""
        rho = torch.where(whole > 0, (squares / whole).sqrt().clamp(max=1.0), 1.0)
        last = self.table[:, FACTOR].clone()
        factor = torch.where(largest > 0, largest, 1.0) * rho + (1.0 - rho)
        factor = factor.clamp(least, most)
        factor = torch.minimum(
            torch.maximum(factor, last * (1.0 - threshold)), last * (1.0 + threshold)
        )
        self.table[:, FACTOR] = factor
        total, weight = self.table[:, RATIO], self.table[:, WEIGHT]
        ratio = torch.where(weight > 0, total / weight if self._corrected else total, 1.0)
        return torch.where(self._layered, ratio * factor, 1.0).float()


def _inverse(flat: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0."""
    return flat.reciprocal().masked_fill_(flat == 0, 0.0)
