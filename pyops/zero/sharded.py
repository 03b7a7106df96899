"""Parameters of one unit of the model, of which each rank keeps a chunk; they are whole only while the unit computes.

    shard   | this rank's chunk |                               always there; what the optimizer steps
    data    | chunk 0 | chunk 1 | chunk 2 |                     gathered before use, its memory given back after it
    kept    | its part in a small group |                       with secondary_group=, from the first gather to the step
              the parameters are views of it, whether there is memory behind or not

A view that autograd has saved in forward points to the same storage in backward, so gathering again makes it valid again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives import all_gather
from pyops.comm.communicator import Communicator
from pyops.comm.work import Work
from pyops.zero.parameters import FlatParameters
from pyops.zero.wire import Wire, coded_all_gather, speaks

__all__ = ["ShardedParameters"]


class ShardedParameters(FlatParameters):
    """As FlatParameters, in one bucket. After `scatter()` only `shard` has memory, until `start_gather`."""

    kept: Tensor | None = None

    def scatter(self) -> None:
        """Keep this rank's chunk of what `data` holds now."""
        if self.partition.ranks > 1:
            self.shard = self.data[self.partition.chunk(0, self.rank)].clone()
            self.release()

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters when they are gathered."""
        return self.partition.layout.numel * self.data.element_size()

    @property
    def is_whole(self) -> bool:
        return self.data.untyped_storage().nbytes() > 0

    def chunk(self, bucket: int) -> Tensor:
        if self.partition.ranks > 1:
            return self.shard
        return self.data

    def start_gather(self, communicator: Communicator, *, async_op: bool, wire: Wire | None = None) -> Work:
        """Memory for all parameters, and all ranks' chunks on their way into it: as `wire` says, None for as they are."""
        self.data.untyped_storage().resize_(self.nbytes)
        part, label = self.shard, f"parameters of {self.label}"
        if wire is not None and wire.secondary is not None and self.kept is not None:
            part, communicator = self.kept, wire.secondary
        elif wire is not None and wire.gather is not None and speaks(wire.gather, self.dtype):
            return coded_all_gather(
                part, self.data, codec=wire.gather, communicator=communicator, async_op=async_op, label=label
            )
        found: Any = all_gather(part, out=self.data, communicator=communicator, async_op=async_op, label=label)
        return found if async_op else Work(found)

    def keep(self, secondary: Communicator) -> None:
        """Keep this rank's part in the small group of what has been gathered, for the next gathers; until `forget`."""
        if self.kept is None:
            each = self.data.numel() // secondary.size
            self.kept = self.data[secondary.rank * each : (secondary.rank + 1) * each].clone()

    def forget(self) -> None:
        """What was kept holds old values."""
        self.kept = None

    def release(self) -> None:
        """Give the memory of the whole parameters back."""
        if self.partition.ranks > 1:
            self.data.untyped_storage().resize_(0)

    def take_over(self) -> None:
        """Keep this rank's chunk of the gathered parameters, which somebody may have changed."""
        if self.partition.ranks > 1:
            with torch.no_grad():
                self.shard.copy_(self.data[self.partition.chunk(0, self.rank)])

    def published(self) -> list[int]:
        return []  # gathered when they are needed
