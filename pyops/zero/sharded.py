"""Parameters of one unit of the model, of which each rank keeps a chunk; they are whole only while the unit computes.

    shard   | this rank's chunk |                               always there; what the optimizer steps
    data    | chunk 0 | chunk 1 | chunk 2 |                     gathered before use, its memory given back after it
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

__all__ = ["ShardedParameters"]


class ShardedParameters(FlatParameters):
    """As FlatParameters, in one bucket. After `scatter()` only `shard` has memory, until `start_gather`."""

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

    def start_gather(self, communicator: Communicator, *, async_op: bool) -> Work:
        """Memory for all parameters, and all ranks' chunks on their way into it."""
        self.data.untyped_storage().resize_(self.nbytes)
        found: Any = all_gather(
            self.shard, out=self.data, communicator=communicator, async_op=async_op, label=f"parameters of {self.label}"
        )
        return found if async_op else Work(found)

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
