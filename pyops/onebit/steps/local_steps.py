"""Steps that a rank takes alone between two messages, and what it must keep for the message that
makes the ranks one again.

    anchor x   p before the first of them, the same on all ranks
    alone      w = beta1 w + (1 - beta1) g / (sqrt(v) + eps)    p = p (1 - lr wd) - lr w
               s = s (1 - lr wd) + lr w    D = D (1 - lr wd)    L = L (1 - lr wd) + lr
               each rank its own
    message    w = the ranks' mean of s / L, compressed
               p = x D - L w        s = 0, D = 1, L = 0

In an interval of one step s / L is w itself, and x is p. The anchor is kept, and not found again by
subtracting the steps, so that p has the same bits on all ranks after each message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pyops.flat import FlatLayout, Shard
from pyops.onebit.steps.state_slots import StateSlots

__all__ = ["LocalSteps", "load_rows", "rows_of"]


class LocalSteps:
    """x, s, D and L. sums, anchor: flat fp32. decays, rates: one of each per group."""

    def __init__(self, slots: StateSlots, *, groups: int) -> None:
        self.slots, self._groups = slots, groups
        self.sums, self.anchor = slots.zeros(), slots.zeros()
        self.restart()

    def restart(self) -> None:
        self.sums.zero_()
        self.decays, self.rates = [1.0] * self._groups, [0.0] * self._groups

    @property
    def begun(self) -> bool:
        """Whether this rank has moved since the last message."""
        return any(self.rates) or any(decay != 1.0 for decay in self.decays)

    def masters(self, states: Mapping[Tensor, Mapping[str, Any]]) -> list[Tensor]:
        """What steps move: parameters, or their fp32 masters."""
        return [
            states[slot.parameter].get("master", slot.parameter.detach()) for slot in self.slots
        ]

    def return_to_anchor(self, masters: Sequence[Tensor]) -> None:
        for slot, master in zip(self.slots, masters, strict=True):
            master.copy_(slot.view(self.anchor))

    def remember(self, parameters: Sequence[Tensor]) -> None:
        """Make the anchor of these, one for each slot."""
        for slot, parameter in zip(self.slots, parameters, strict=True):
            slot.view(self.anchor).copy_(parameter)

    def add(self, means: Tensor, rates: Sequence[tuple[float, float]]) -> None:
        """Take in a local step.

        Args:
            means: Flat.
            rates: (lr, weight decay) of each group.
        """
        for g, (lr, decay) in enumerate(rates):
            keep = 1 - lr * decay
            self.decays[g] *= keep
            self.rates[g] = self.rates[g] * keep + lr
        for slot in self.slots:
            lr, decay = rates[slot.group]
            sums = self.sums[slot.start : slot.stop]
            if lr * decay:
                sums.mul_(1 - lr * decay)
            sums.add_(means[slot.start : slot.stop], alpha=lr)


def rows_of(flat: Tensor, layout: FlatLayout, *, rank: int, size: int) -> dict[str, Shard]:
    """This rank's row of a tensor [size, *shape] for each name, without copying."""
    found = {}
    for index, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)):
        row = flat[layout.slice_at(index)].view(1, *shape)
        found[name] = Shard((size, *shape), (rank, *(0 for _ in shape)), row)
    return found


def load_rows(
    saved: Mapping[str, Tensor | Shard], layout: FlatLayout, flat: Tensor, *, rank: int, size: int
) -> None:
    """Fill `flat` with this rank's rows, or, of another number of ranks, with the mean of theirs.
    ValueError: rows lack."""
    for index, name in enumerate(layout.names):
        value = saved[name]
        whole = value.global_shape[0] if isinstance(value, Shard) else len(value)
        rows = value.tensor if isinstance(value, Shard) else value
        first = value.offset[0] if isinstance(value, Shard) else 0
        if whole == size and first <= rank < first + len(rows):
            row = rows[rank - first]
        elif len(rows) == whole:
            row = rows.double().mean(0)
        else:
            raise ValueError(
                f"the state has the rows of {len(rows)} of {whole} ranks for {name!r}, "
                f"and this run has {size} ranks; give "
                " every rank all rows: save and load with pyops.checkpoint"
            )
        flat[layout.slice_at(index)].copy_(row.reshape(-1))
