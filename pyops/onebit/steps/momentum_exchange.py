"""One compressed all-reduce of a flat tensor, with its error buffers, and nothing where nothing
moves.

    flat [n] -> dead elements to 0 -> compressed_all_reduce, error feedback -> dead elements to 0 -> flat, same bits everywhere

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
from pyops.onebit.steps.state_slots import Places

__all__ = ["Exchange"]


class Exchange:
    """What a compressed phase keeps. variances: one for each place, None: only padding is dead.
    errors: ErrorFeedback."""

    def __init__(
        self,
        places: Places,
        variances: Sequence[Tensor] | None,
        *,
        codec: Codec,
        communicator: Communicator | None,
    ) -> None:
        self.places, self.codec, self._communicator = places, codec, communicator
        rank, size = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        self.errors = ErrorFeedback(
            places.layout, codec=codec, rank=rank, size=size, device=places.zeros().device
        )
        self.bury(variances)

    def bury(self, variances: Sequence[Tensor] | None) -> None:
        """Find the dead elements anew."""
        places = self.places
        alive = places.gather(
            [torch.ones_like(place.parameter, dtype=torch.float32) for place in places]
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
        for place in self.places:
            if (ratio := ratios[place.group]) != 1.0:
                self.errors.worker[place.start : place.stop].mul_(ratio)
                low, high = max(start, place.start), min(stop, place.stop)
                if low < high:
                    self.errors.server[low - start : high - start].mul_(ratio)

    def adopt(self, other: Exchange) -> None:
        """The errors of one with fewer places, whose chunks lie otherwise: a server's error becomes
        a part of its worker's."""
        old = other.errors
        start, stop = old.starts[old.rank : old.rank + 2]
        left = old.worker.clone()
        left[start:stop].add_(old.server, alpha=old.size)
        before = {place.parameter: place for place in other.places}
        for place in self.places:
            if place.parameter in before:
                place.view(self.errors.worker).copy_(before[place.parameter].view(left))
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
