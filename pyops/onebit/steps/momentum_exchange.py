"""One compressed all-reduce of a flat tensor, with its error buffers, and nothing where nothing
moves.

    flat [n] -> dead elements to 0 -> compressed_all_reduce, error feedback -> dead elements to 0 ->
    flat, same bits everywhere

Dead: padding, and elements whose variance is 0. A bit can't say 0, so they come back as +-scale,
and what was added to them waits in the error buffers; both are set to 0 again, so that they stay
out of the scale of their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.comm.compression.error_feedback import ErrorFeedback
from pyops.onebit.steps.state_slots import StateSlots

__all__ = ["MomentumExchange"]


class MomentumExchange:
    """What a compressed phase keeps.

    Args:
        variances: One for each slot, None: only padding is dead. errors: ErrorFeedback.
    """

    def __init__(
        self,
        slots: StateSlots,
        variances: Sequence[Tensor] | None,
        *,
        codec: Codec,
        communicator: Communicator | None,
    ) -> None:
        self.slots, self.codec, self._communicator = slots, codec, communicator
        rank, size = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        self.errors = ErrorFeedback(
            slots.layout, codec=codec, rank=rank, size=size, device=slots.zeros().device
        )
        self.find_dead(variances)

    def find_dead(self, variances: Sequence[Tensor] | None) -> None:
        """Find the dead elements anew."""
        slots = self.slots
        alive = slots.gather(
            [torch.ones_like(slot.parameter, dtype=torch.float32) for slot in slots]
            if variances is None
            else [(v > 0).float() for v in variances]
        )
        dead = (alive == 0).nonzero().view(-1)
        start, stop = self.errors.starts[self.errors.rank : self.errors.rank + 2]
        self._dead = dead
        self._dead_in_chunk = dead[(dead >= start) & (dead < stop)] - start

    def rescale(self, ratio: Tensor) -> None:
        """Measure errors in other units: times ratio, flat."""
        start, stop = self.errors.starts[self.errors.rank : self.errors.rank + 2]
        self.errors.worker.mul_(ratio)
        self.errors.server.mul_(ratio[start:stop])

    def rescale_groups(self, ratios: Sequence[float]) -> None:
        """As `rescale`, by one number for each param group."""
        start, stop = self.errors.starts[self.errors.rank : self.errors.rank + 2]
        for slot in self.slots:
            if (ratio := ratios[slot.group]) != 1.0:
                self.errors.worker[slot.start : slot.stop].mul_(ratio)
                low, high = max(start, slot.start), min(stop, slot.stop)
                if low < high:
                    self.errors.server[low - start : high - start].mul_(ratio)

    def adopt(self, other: MomentumExchange) -> None:
        """The errors of one with fewer slots, whose chunks lie otherwise: a server's error becomes
        a part of its worker's."""
        old = other.errors
        start, stop = old.starts[old.rank : old.rank + 2]
        left = old.worker.clone()
        left[start:stop].add_(old.server, alpha=old.size)
        before = {slot.parameter: slot for slot in other.slots}
        for slot in self.slots:
            if slot.parameter in before:
                slot.view(self.errors.worker).copy_(before[slot.parameter].view(left))
        self.errors.rounds = old.rounds

    def average(self, flat: Tensor, *, label: str) -> None:
        """The ranks' mean of `flat`, in place."""
        flat.index_fill_(0, self._dead, 0.0)
        compressed_all_reduce(
            flat,
            codec=self.codec,
            error=self.errors,
            op="mean",
            communicator=self._communicator,
            label=label,
        )
        flat.index_fill_(0, self._dead, 0.0)
        self.errors.worker.index_fill_(0, self._dead, 0.0)
        self.errors.server.index_fill_(0, self._dead_in_chunk, 0.0)
