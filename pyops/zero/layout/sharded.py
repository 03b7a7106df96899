"""Parameters of one unit of the model, of which each rank keeps a chunk; they are whole only while
the unit computes.

    shard   | this rank's chunk |                               what the optimizer steps: always
                                                                there, or in a ParameterFile
    data    | chunk 0 | chunk 1 | chunk 2 |                     gathered before use, its memory
                                                                given back after it
    kept    | its part in a small group |                       with secondary_group=, from the
                                                                first gather to the step
              the parameters are views of it, whether there is memory behind or not

A view that autograd has saved in forward points to the same storage in backward, so gathering again
makes it valid again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather
from pyops.comm.collectives.work import Work
from pyops.torch_private import storage_use_count
from pyops.zero.layout.parameter_file import FileSlice, ParameterFile, PendingRead
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Piece
from pyops.zero.layout.quantized_comm import QuantizedComm, coded_all_gather, takes_dtype

__all__ = ["ShardedParameters"]


class ShardedParameters(FlatParameters):
    """As FlatParameters, in one bucket. After `scatter()` only `shard` has memory, until
    `start_gather`; nothing has when it is in a file, its `region`. One rank alone has a shard only
    there: it is all of `data`."""

    kept: Tensor | None = None
    region: FileSlice | None = None

    def scatter(self, file: ParameterFile | None = None) -> None:
        """Keep this rank's chunk of what `data` holds now."""
        if self.partition.ranks > 1:
            self.shard = self.data[self.partition.chunk(0, self.rank)].clone()
            self.release()
        if file is not None:
            # A tensor without memory can't be cut, so all views of it are made before.
            self._pieces = {
                p.index: super(ShardedParameters, self).piece(p)
                for p in self.partition.pieces(self.rank)
            }
            self.region = file.place(self.chunk(0))

    def piece(self, piece: Piece) -> Tensor:
        return super().piece(piece) if self.region is None else self._pieces[piece.index]

    @property
    def is_spread(self) -> bool:
        """Whether the parameters have no memory but while they are used."""
        return self.partition.ranks > 1 or self.region is not None

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

    def read_ahead(self) -> None:
        """Begin to read what the next gather will send, if it is in a file."""
        if self.region is not None and self.kept is None and not self.is_whole:
            self.region.fetch()

    def start_gather(
        self,
        everyone: Communicator | None,
        *,
        async_op: bool,
        wire: QuantizedComm | None = None,
    ) -> Work:
        """Memory for all parameters, and the chunks of all ranks that hold them on their way into
        it: as `wire` says, None for as they are. What is not spread is there."""
        if not self.is_spread:
            return Work(self.data)
        communicator = self.over(everyone)
        if communicator is None:
            assert self.region is not None
            self.region.fetch()
            return PendingRead(None, self.region)
        self.data.untyped_storage().resize_(self.nbytes)
        common: dict[str, Any] = {"async_op": async_op, "label": f"parameters of {self.label}"}
        if wire is not None and wire.secondary is not None and self.kept is not None:
            found: Any = all_gather(self.kept, out=self.data, communicator=wire.secondary, **common)
            return found if async_op else Work(found)
        if self.region is not None:
            self.region.load()
        if wire is not None and wire.gather is not None and takes_dtype(wire.gather, self.dtype):
            work = coded_all_gather(
                self.shard, self.data, codec=wire.gather, communicator=communicator, **common
            )
        else:
            found = all_gather(self.shard, out=self.data, communicator=communicator, **common)
            work = found if async_op else Work(found)
        return work if self.region is None else PendingRead(work, self.region)

    def keep(self, secondary: Communicator) -> None:
        """Keep this rank's part in the small group of what has been gathered, for the next gathers;
        until `forget`."""
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
        elif self.region is not None:
            self.region.drop()

    def holders(self) -> int:
        """How many tensors there are over the gathered memory."""
        return storage_use_count(self.data)

    def leave(self) -> None:
        """Leave the gathered memory, as it is, to whoever has views of it, and gather into another
        from now on."""
        layout = self.partition.layout
        data = torch.empty_like(self.data)
        views = [
            data[layout.slice_at(i)].view(layout.shapes[i]) for i in range(len(self.parameters))
        ]
        self.data.set_(data)  # type: ignore[call-overload]  # the same tensor, by which others know where the parameters lie
        data.untyped_storage().resize_(0)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def take_over(self) -> None:
        """Keep this rank's chunk of the gathered parameters, which somebody may have changed."""
        if self.region is not None:
            self.region.make()
        if self.partition.ranks > 1:
            with torch.no_grad():
                self.shard.copy_(self.data[self.partition.chunk(0, self.rank)])
        if self.region is not None:
            self.region.save()
            self.region.drop()

    def published(self) -> list[int]:
        return []  # gathered when they are needed
