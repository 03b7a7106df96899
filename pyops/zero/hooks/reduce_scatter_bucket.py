"""One bucket of gradients: this rank's whole gradient while backward fills it, then its chunk.

fill, start      whole   [ w0 | b0 | w1 | b1 | padding ]     this rank's gradient
finish           chunk        [ b0 | w1 ]                    what this rank owns, summed over all
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce, reduce_scatter
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_reduce_scatter
from pyops.torch_private import without_torch_function
from pyops.zero.hooks.reduced_gradient import ReducedGradient
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Piece
from pyops.zero.layout.quantized_comm import takes_dtype

__all__ = ["ReduceScatterBucket"]


class ReduceScatterBucket:
    """The gradient of one bucket of parameters.

    whole: this rank's gradient, None while there is none. chunk: the reduced gradient of what this
    rank owns, None likewise. epilogue: called with the chunk when it is summed, before anybody sees
    it: a mask is applied there; None: nothing is.

    Args:
        keeps: Whether the memory of `whole` stays; or the memory of the whole flat buffer's, which
            stays.
    """

    def __init__(self, flat: FlatParameters, number: int, *, keeps: bool | Tensor) -> None:
        self.flat, self.number = flat, number
        bucket = flat.partition.buckets[number]
        self.members, self._start, self.numel = (
            bucket.members,
            bucket.start,
            bucket.stop - bucket.start,
        )
        chunk = flat.partition.chunk(number, flat.rank)
        self._own = slice(chunk.start - bucket.start, chunk.stop - bucket.start)
        self._padding = flat.partition.padding(number)
        self._memory: Tensor | None = None
        if isinstance(keeps, Tensor):
            self._memory = self._cleared(keeps[bucket.start : bucket.stop])
        elif keeps:
            self._memory = self._allocate()
        self.whole: Tensor | None = None
        self.chunk: Tensor | None = None
        self._before: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._work: Work | None = None
        self._coded, self._scale = False, 1.0
        self.epilogue: Callable[[Tensor], None] | None = None

    @property
    def kept_bytes(self) -> int:
        """What there is between backward and step, and where the memory stays, always."""
        chunk = self._own.stop - self._own.start
        itemsize = torch.empty(0, dtype=self.flat.dtype, device="cpu").element_size()
        return (self.numel if self._memory is not None else chunk) * itemsize

    @property
    def reused(self) -> bool:
        """Whether the next backward's gradient will lie where this one does."""
        return self._memory is not None

    def _allocate(self) -> Tensor:
        return self._cleared(
            torch.empty(self.numel, dtype=self.flat.dtype, device=self.flat.device)
        )

    def _cleared(self, whole: Tensor) -> Tensor:
        for gap in self._padding:
            whole[gap].zero_()
        return whole

    def view(self, index: int) -> Tensor:
        """Where parameter number `index` of the buffer has its gradient in `whole`."""
        assert self.whole is not None
        where = self.flat.partition.layout.slice_at(index)
        return self.whole[where.start - self._start : where.stop - self._start].view(
            self.flat.parameters[index].shape
        )

    @torch.no_grad()
    def store(self, index: int) -> None:
        """Make the parameter's gradient a view of `whole`, with the values that it has."""
        parameter = self.flat.parameters[index]
        if self.whole is None:
            self.whole = self._memory if self._memory is not None else self._allocate()
            if self._memory is not None and self.chunk is not None:
                self.chunk = (
                    self.chunk.clone()
                )  # of an earlier backward; it lies where this gradient will
        found, view = parameter.grad, self._views.get(index)
        if isinstance(found, ReducedGradient):  # of an earlier backward, which is in the chunk
            found = found.take_arrived()
        if view is not None and found is view:
            return
        if view is None:
            view = self._views[index] = self.view(index)
        assert found is not None
        view.copy_(found)
        parameter.grad = view

    def part(self, piece: Piece) -> Tensor | None:
        """This rank's part of a parameter's reduced gradient."""
        return None if self.chunk is None else self.chunk[piece.of_chunk]

    def view_like(self, index: int) -> Tensor:
        """A tensor without memory that is like the parameter's gradient."""
        return torch.empty(
            self.flat.partition.layout.shapes[index], dtype=self.flat.dtype, device="meta"
        )

    def takes(self, index: int) -> bool:
        """Whether the parameter's gradient is still to be reduced."""
        return self.whole is not None or index in self._views

    def was_dropped(self, index: int, *, arriving: bool) -> bool:
        """Whether somebody took away what backwards within no_sync() had left.

        Args:
            arriving: Another gradient is in its place.
        """
        if index not in self._views:
            return False
        found = self.flat.parameters[index].grad
        return found is None or (
            arriving and found is not self._views[index] and not torch.is_grad_enabled()
        )  # create_graph

    def fill(self) -> None:
        """Make `whole` this rank's gradient in all its places: what has none counts as zero."""
        for index in self.members:
            parameter = self.flat.parameters[index]
            if (
                index not in self._views or parameter.grad is None
            ):  # dropped by somebody, after a backward within no_sync
                self.view(index).zero_()
            elif parameter.grad is not self._views[index]:
                self._views[index].copy_(parameter.grad)

    def start(
        self,
        communicator: Communicator | None,
        *,
        reduction: str,
        async_op: bool,
        label: str,
        codec: Codec | None = None,
    ) -> None:
        """Start the reduce-scatter, of the codec's numbers where there is one. Parameters without a
        gradient count as zero.

        Args:
            communicator: Of all data-parallel ranks; `flat.over` says which of them have these.
        """
        if self.whole is None:
            self.whole = self._memory if self._memory is not None else self._allocate()
            if self._memory is not None and self.chunk is not None:
                self.chunk = self.chunk.clone()
        self.fill()
        self._forget_views()
        self._before = self.chunk
        own = self.whole[self._own]
        self._work = None
        communicator = self.flat.over(communicator)
        if self.flat.own is not None and reduction == "mean":
            self._scale = self.flat.own.share
        if communicator is None:
            self.chunk = own
            return
        common: dict[str, Any] = {
            "op": reduction,
            "async_op": async_op,
            "label": label,
            "communicator": communicator,
        }
        if self.flat.partition.ranks == 1:  # every rank owns everything
            self.chunk, work = own, all_reduce(self.whole, offset=self._start, **common)
        elif codec is not None and takes_dtype(codec, self.flat.dtype):
            self.chunk, self._coded = own, True
            found = compressed_reduce_scatter(self.whole, codec=codec, **common)
            self._work = found if async_op else Work(found)
            return
        else:
            self.chunk = own if self._memory is not None else torch.empty_like(own)
            work = reduce_scatter(self.whole, out=self.chunk, **common)
        self._work = work if async_op else None

    def finish(self) -> None:
        """Wait for the reduce-scatter; `chunk` is then the sum, or mean, with what earlier
        backwards left."""
        found = None if self._work is None else self._work.wait()
        if self._coded:  # it comes in a tensor of its own
            assert self.chunk is not None
            assert found is not None
            self.chunk = found if self._memory is None else self.chunk.copy_(found)
        self._work, self._coded = None, False
        if self._scale != 1.0:
            assert self.chunk is not None
            self.chunk.mul_(self._scale)
        if self.epilogue is not None and self.chunk is not None:
            self.epilogue(self.chunk)
        if self._before is not None:
            assert self.chunk is not None
            self.chunk.add_(self._before)
        self._before = self.whole = None
        self._scale = 1.0

    def _forget_views(self) -> None:
        with without_torch_function():  # of parameters that are spread at stage 3
            for index in self._views:
                self.flat.parameters[index].grad = None
        self._views.clear()

    def clear(self) -> None:
        """Forget the gradient."""
        self._forget_views()
        self.whole = self.chunk = self._before = self._work = None
        self._coded = False
