"""The variance of 0/1 Adam before it freezes: every step of every rank counts, though few steps
send anything exact.

    each step     s = d s + (1 - d) g^2                      g: this rank's own gradient; d = min(1
                                                             - 2 / k, limit); no message
    exact round   mean s over ranks                          2 bytes a number, by the codec of v
                  [h | ||h||^2 per layer]                    exactly; h: g of small layers, a sketch
                                                             of g of others
                  a = a / 2 + ||mean h||^2      b = b / 2 + mean ||h||^2      per layer
                  v = (c + q (c + 1 / ranks)) * mean s      c = a / b

The square of one rank's gradient holds the noise of that rank's batch, of which the mean over ranks
has less: c is 1 for one rank or no noise, 1 / ranks for noise alone. And v should be of what moves
the parameters, to which messages add noise of their own: a codec that leaves out a share q of the
squared norm adds it twice, where ranks write (1 / ranks of it is left in the mean) and where their
mean is written again. One bit for numbers of a normal distribution: q = 1 - 2 / pi.

A sketch is 1,024 numbers, each the sum of every 1,024th element with random signs: linear in g, and
||h||^2 is ||g||^2 within 4 % (Charikar et al., count sketch, ICALP 2002). k counts the gradients
that this rank has seen of a tensor: d is 0 for the first two, and then s is about a mean over the
last half of them, until d reaches its limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pyops import random
from pyops.comm.buckets.grad_norm import squares_of_each
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.flat import FlatLayout
from pyops.onebit.steps.local_steps import load_rows, rows_of
from pyops.onebit.steps.state_slots import StateSlots
from pyops.protocols import ParamGroup

__all__ = ["SharedVariance"]

DECAY = 0.995  # or beta2, if that is more
SMOOTHING = 0.5
SKETCH = 1024  # numbers


def sketch(layer: Tensor, name: str) -> Tensor:
    """fp32 [at most SKETCH], with about the norm of the flat layer; the same signs for one name,
    always."""
    if len(layer) <= SKETCH:
        return layer
    signs = (
        random.uniform(0, f"sketch of {name}", (len(layer),), device=layer.device)
        .round_()
        .mul_(2.0)
        .sub_(1.0)
    )
    rows = -(-len(layer) // SKETCH)
    return (
        functional.pad(signs.mul_(layer), (0, rows * SKETCH - len(layer))).view(rows, SKETCH).sum(0)
    )


class SharedVariance:
    """Over all parameters, with and without a gradient. squares: flat fp32, s. means, owns: a and
    b, one of each per layer."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self.slots = StateSlots(groups, moved={p for group in groups for p in group["params"]})
        self.layout = self.slots.layout
        self.squares = self.slots.zeros()
        self.counts = torch.zeros(len(self.slots), device="cpu")
        self.means, self.owns = ([0.0] * len(self.layout.names) for _ in range(2))

    def extended(self, groups: Sequence[ParamGroup]) -> SharedVariance:
        """This one, or its successor when there are more parameters now."""
        if len(self.slots) == sum(len(group["params"]) for group in groups):
            return self
        new = SharedVariance(groups)
        before = {slot.parameter: (i, slot.view(self.squares)) for i, slot in enumerate(self.slots)}
        for j, slot in enumerate(new.slots):
            if slot.parameter in before:
                i, squares = before[slot.parameter]
                slot.view(new.squares).copy_(squares)
                new.counts[j] = self.counts[i]
        for old, fresh in ((self.means, new.means), (self.owns, new.owns)):
            known = dict(zip(self.layout.names, old, strict=True))
            fresh[:] = [known.get(name, 0.0) for name in new.layout.names]
        return new

    def take(self, factor: float) -> None:
        """The squares of this rank's gradients, times factor, into s."""
        for i, slot in enumerate(self.slots):
            gradient = slot.parameter.grad
            if gradient is None and not self.counts[i]:
                continue
            self.counts[i] += 1
            limit = max(DECAY, float(self._groups[slot.group]["betas"][1]))
            decay = min(max(0.0, 1 - 2 / float(self.counts[i])), limit)
            squares = slot.view(self.squares).mul_(decay)
            if gradient is not None:
                gradient = gradient.float() * factor
                squares.addcmul_(gradient, gradient, value=1 - decay)

    def exchange(
        self, factor: float, *, codec: Codec, communicator: Communicator | None, noise: float = 0.0
    ) -> tuple[Tensor, list[bool]]:
        """The exact round: v, flat, the same on all ranks; and for each slot whether any rank has
        had a gradient of it yet.

        Args:
            codec: Of v.
            noise: Q.
        """
        ranks = 1 if communicator is None else communicator.size
        gradients = self._sketches(factor)
        own = squares_of_each(gradients).float()
        squares, seen, norms = self.squares.clone(), self.counts, own
        if communicator is not None and ranks > 1:
            compressed_all_reduce(squares, codec=codec, communicator=communicator, label="variance")
            message = torch.cat([*gradients, own, seen.to(own.device)])
            all_reduce(message, op="mean", communicator=communicator, label="noise of the variance")
            *gradients, norms, seen = message.split(
                [*(len(each) for each in gradients), len(own), len(seen)]
            )
        means = squares_of_each(gradients).float()
        for index, (mean, each) in enumerate(zip(means.tolist(), norms.tolist(), strict=True)):
            self.means[index] = SMOOTHING * self.means[index] + mean
            self.owns[index] = SMOOTHING * self.owns[index] + each
            if self.owns[index] > 0:
                share = min(1.0, self.means[index] / self.owns[index])
                squares[self.layout.slice_at(index)].mul_(share + noise * (share + 1 / ranks))
        return squares, [bool(number) for number in seen.tolist()]

    def _sketches(self, factor: float) -> list[Tensor]:
        """Of this rank's gradient, times factor, layer by layer."""
        flat = self.slots.gather([slot.parameter.grad for slot in self.slots]).mul_(factor)
        return [
            sketch(flat[self.layout.slice_at(index)], name)
            for index, name in enumerate(self.layout.names)
        ]

    def exact_numel(self) -> int:
        """How many numbers an exact round sends exactly."""
        layers = [min(SKETCH, prod(shape)) for shape in self.layout.shapes]
        return sum(layers) + len(layers) + len(self.slots)

    # --------------------------------------------------------------------------------------------
    # saving

    def state_dict(self, *, rank: int, size: int) -> dict[str, Any]:
        """s and its counts are rows of this rank; a and b are the same on all."""
        where = {"rank": rank, "size": size}
        return {
            "squares": rows_of(self.squares, self.layout, **where),
            "counts": rows_of(self.counts, self._counted(), **where),
            "means": list(self.means),
            "owns": list(self.owns),
            "ranks": size,
        }

    def load_state_dict(self, state: Mapping[str, Any], *, rank: int, size: int) -> None:
        """Of another number of ranks: the mean of theirs; a and b, which say what a mean over so
        many does, begin anew."""
        load_rows(state["squares"], self.layout, self.squares, rank=rank, size=size)
        load_rows(state["counts"], self._counted(), self.counts, rank=rank, size=size)
        self.counts.ceil_()
        if state["ranks"] == size:
            self.means, self.owns = list(state["means"]), list(state["owns"])

    def _counted(self) -> FlatLayout:
        return FlatLayout(("tensors",), ((len(self.slots),),), (0,), len(self.slots))
