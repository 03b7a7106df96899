"""Parameters of one dtype and device in one buffer, whole on every rank, of which each rank owns a
part.

    data   | head | pad | block 3 | ... | embedding | pad |   the parameters are views of it
             ^^^^               ^^^^^^^                       this rank's chunks of the buckets:
                                                              views of it too

A step writes the chunks; an all-gather in place then brings the other ranks' chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_gather
from pyops.comm.collectives.work import Work
from pyops.flat import FlatLayout
from pyops.zero.layout.materialize import adopt
from pyops.zero.layout.partition import Partition, Piece

__all__ = ["FlatParameters"]


class FlatParameters:
    """named: (name, parameter) pairs of one dtype and device, in the order in which backward
    reaches them. device: of those on the meta device, whose values are then still to be filled in.

    partition     who owns what
    data          the buffer, whole
    parameters    nn.Parameters, views of `data`
    rank          this rank's number among the owners
    own           the ranks that hold these parameters, where they are not all data-parallel ranks
    """

    own: OwnRanks | None = None

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        rank: int,
        ranks: int,
        bucket_bytes: int | None,
        device: torch.device,
        label: str = "",
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.rank, self.label = rank, label
        like = self.parameters[0]
        self.dtype, self.device = like.dtype, device if like.is_meta else like.device
        self.partition = Partition.plan(
            [(name, p.shape) for name, p in named],
            ranks=ranks,
            item_size=like.element_size(),
            bucket_bytes=bucket_bytes,
        )
        layout = self.partition.layout
        self.data = torch.zeros(layout.numel, dtype=self.dtype, device=self.device)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters):
                adopt(parameter, self.data[layout.slice_at(index)].view(layout.shapes[index]))

    @torch.no_grad()
    def move(self, data: Tensor) -> None:
        """Put everything into other memory: the parameters become views of it.

        Args:
            data: As many elements of the same dtype, on the same device.
        """
        data.copy_(self.data)
        self.data, layout = data, self.layout
        for index, parameter in enumerate(self.parameters):
            parameter.data = data[layout.slice_at(index)].view(layout.shapes[index])

    def over(self, everyone: Communicator | None) -> Communicator | None:
        """The communicator of the ranks that hold these parameters; None for this rank alone.

        Args:
            everyone: That of all data-parallel ranks.
        """
        return everyone if self.own is None else self.own.communicator

    def copy(self, everyone: Communicator | None) -> tuple[int, int]:
        """Which copy of the elements that it steps this rank has, and how many ranks have one.

        Args:
            everyone: See `over`.
        """
        over = self.over(everyone)
        return (0, 1) if self.partition.ranks > 1 or over is None else (over.rank, over.size)

    @property
    def layout(self) -> FlatLayout:
        return self.partition.layout

    @property
    def names(self) -> tuple[str, ...]:
        return self.partition.layout.names

    def chunk(self, bucket: int) -> Tensor:
        """This rank's chunk of a bucket: what it steps."""
        return self.data[self.partition.chunk(bucket, self.rank)]

    def piece(self, piece: Piece) -> Tensor:
        """This rank's piece of a parameter."""
        return self.chunk(piece.bucket)[piece.of_chunk]

    def gather(self, bucket: int, everyone: Communicator, *, async_op: bool) -> Work:
        """Bring the chunks of the bucket together, in place, of all ranks that hold it."""
        where = self.partition.buckets[bucket]
        found: Any = all_gather(
            self.chunk(bucket),
            out=self.data[where.start : where.stop],
            communicator=self.over(everyone),
            async_op=async_op,
            label=f"parameters{self.label}, bucket {bucket} of {len(self.partition.buckets)}",
        )
        return found if async_op else Work(found)

    def published(self) -> list[int]:
        """The buckets that have to be gathered after a step."""
        return list(range(len(self.partition.buckets))) if self.partition.ranks > 1 else []
