"""The variance of 0/1 Adam before it freezes: every step of every rank counts, though few steps send anything exact.

    each step      s = d s + (1 - d) g^2                      g: this rank's own gradient; d = min(1 - 2 / k, limit); no message
    exact round    [g | s | ||g||^2 per layer]                one all-reduce, the mean over ranks, 2 x fp32
                   a = a / 2 + ||mean g||^2      b = b / 2 + mean ||g||^2      per layer
                   v = a / b * mean s

The square of one rank's gradient holds the noise of that rank's batch, of which the mean over ranks has less: a / b is 1 for
one rank or no noise, 1 / ranks for noise alone. k counts the gradients that this rank has seen of a tensor: d is 0 for the
first two, and then s is about a mean over the last half of them, until d reaches its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives import all_reduce
from pyops.flat import FlatLayout
from pyops.onebit.flat_states import Places
from pyops.onebit.local_steps import load_rows, rows_of
from pyops.ops.grad_norm import squared_norm

__all__ = ["SharedVariance"]

DECAY = 0.995  # or beta2, if that is more
SMOOTHING = 0.5

Group = dict[str, Any]


class SharedVariance:
    """Over all parameters, with and without a gradient. squares: flat fp32, s. means, owns: a and b, one of each per layer."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self.places = Places(groups, moved={p for group in groups for p in group["params"]})
        self.layout = self.places.layout
        self.squares = self.places.zeros()
        self.counts = torch.zeros(len(self.places))
        self.means, self.owns = ([0.0] * len(self.layout.names) for _ in range(2))

    def extended(self, groups: Sequence[Group]) -> SharedVariance:
        """This one, or its successor when there are more parameters now."""
        if len(self.places) == sum(len(group["params"]) for group in groups):
            return self
        new = SharedVariance(groups)
        before = {place.parameter: (i, place.view(self.squares)) for i, place in enumerate(self.places)}
        for j, place in enumerate(new.places):
            if place.parameter in before:
                i, squares = before[place.parameter]
                place.view(new.squares).copy_(squares)
                new.counts[j] = self.counts[i]
        for old, fresh in ((self.means, new.means), (self.owns, new.owns)):
            known = dict(zip(self.layout.names, old, strict=True))
            fresh[:] = [known.get(name, 0.0) for name in new.layout.names]
        return new

    def take(self, factor: float) -> None:
        """The squares of this rank's gradients, times factor, into s."""
        for i, place in enumerate(self.places):
            gradient = place.parameter.grad
            if gradient is None and not self.counts[i]:
                continue
            self.counts[i] += 1
            limit = max(DECAY, float(self._groups[place.group]["betas"][1]))
            decay = min(max(0.0, 1 - 2 / float(self.counts[i])), limit)
            squares = place.view(self.squares).mul_(decay)
            if gradient is not None:
                gradient = gradient.float() * factor
                squares.addcmul_(gradient, gradient, value=1 - decay)

    def exchange(self, factor: float, *, group: dist.ProcessGroup | None, size: int) -> tuple[Tensor, list[bool]]:
        """The exact round: v, flat, the same on all ranks; and for each place whether any rank has had a gradient of it yet."""
        numel, count = self.layout.numel, len(self.places)
        message = torch.zeros(2 * numel + count + len(self.layout.names), dtype=torch.float32, device=self.squares.device)
        gradients, squares, seen, norms = message.split([numel, numel, count, len(self.layout.names)])
        for place in self.places:
            if place.parameter.grad is not None:
                place.view(gradients).copy_(place.parameter.grad)
        gradients.mul_(factor)
        squares.copy_(self.squares)
        seen.copy_(self.counts)
        norms.copy_(self._norms(gradients))
        if size > 1:
            all_reduce(message, op="mean", group=group, label="variance")
        rows = zip(self._norms(gradients).tolist(), norms.tolist(), strict=True)
        for index, (mean, own) in enumerate(rows):
            self.means[index] = SMOOTHING * self.means[index] + mean
            self.owns[index] = SMOOTHING * self.owns[index] + own
            if self.owns[index] > 0:
                squares[self.layout.slice_at(index)].mul_(min(1.0, self.means[index] / self.owns[index]))
        return squares, [bool(number) for number in seen.tolist()]

    def _norms(self, flat: Tensor) -> Tensor:
        """fp32: the squared norm of each layer, in a fixed order; rounded so that one rank finds the same number twice."""
        layers = [flat[self.layout.slice_at(index)] for index in range(len(self.layout.names))]
        return torch.stack([squared_norm([layer])[0] for layer in layers]).float()

    # ------------------------------------------------------------------------------------------------ saving

    def state_dict(self, *, rank: int, size: int) -> dict[str, Any]:
        """s and its counts are rows of this rank; a and b are the same on all."""
        where = {"rank": rank, "size": size}
        return {
            "squares": rows_of(self.squares, self.layout, **where), "counts": rows_of(self.counts, self._counted(), **where),
            "means": list(self.means), "owns": list(self.owns), "ranks": size,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, rank: int, size: int) -> None:
        """Of another number of ranks: the mean of theirs; a and b, which say what a mean over so many does, begin anew."""
        load_rows(state["squares"], self.layout, self.squares, rank=rank, size=size)
        load_rows(state["counts"], self._counted(), self.counts, rank=rank, size=size)
        self.counts.ceil_()
        if state["ranks"] == size:
            self.means, self.owns = list(state["means"]), list(state["owns"])

    def _counted(self) -> FlatLayout:
        return FlatLayout(("tensors",), ((len(self.places),),), (0,), len(self.places))
