"""Gradients reduce-scattered while backward runs: each rank keeps one chunk of every bucket.

    autograd     [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
    whole        |==== bucket 0 ========|======= bucket 1 ====|== bucket 2 ====|
    reduce-scatter                      [---- 0 ----]         [---- 1 ----]    [-2-]
    chunk        1 / ranks of it                     |=========================> until the step

A hook copies each gradient into its bucket while it is in the cache, and `.grad` becomes a view
there, or None once the bucket has left. Buckets leave in one order on every rank. Stage 1 keeps the
memory of all buckets, stage 2 that of those on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pyops.comm.buckets.gradient_buckets import BucketMember, GradientBuckets
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.compression.codec import Codec
from pyops.torch_private import in_backward, without_torch_function
from pyops.zero.hooks.reduce_scatter_bucket import ReduceScatterBucket
from pyops.zero.layout.parameters import FlatParameters

__all__ = ["ShardedGradients", "wrapped_in_ddp"]

ON_THEIR_WAY = 2  # buckets whose reduce-scatter may be unfinished while another one is filled


def wrapped_in_ddp() -> RuntimeError:
    """The error for a model that DistributedDataParallel has wrapped."""
    return RuntimeError(
        "the model is wrapped in DistributedDataParallel, and ZeroOptimizer reduces its "
        "gradients already: use the model by "
        "itself; with Accelerate pyops.hf.prepare(accelerator, model, optimizer), with "
        "transformers pyops.hf.ZeroTrainer"
    )


class ShardedGradients:
    """The gradients of flat parameters, reduce-scattered bucket by bucket.

    After backward() the chunks of all buckets are final, and `.grad` of the parameters is a
    ReducedGradient. The gradients of several backwards add up until `clear()`. Within `no_sync()`
    gradients stay whole, in `.grad`.

    Args:
        flats: The flat parameters; each has its buckets.
        communicator: None where one rank runs alone.
        keeps: Whether the memory of whole gradients stays, as at stage 1; or that memory, of each
            flat buffer.
        reduction: "mean" or "sum".
        overlap: Whether buckets are reduced while backward goes on; otherwise backward waits for
            each of them.
        positions: positions[f][i] is when the gradient of parameter i of flats[f] is expected, as a
            rank among all.
        automatic: Whether a bucket leaves when it is complete, in one order; otherwise it leaves
            when `start` is called for it, or at the end of backward.
        codec: Compresses what travels; None sends gradients as they are.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        communicator: Communicator | None,
        *,
        keeps: bool | Sequence[torch.Tensor],
        reduction: str,
        overlap: bool,
        positions: Sequence[Sequence[int]],
        automatic: bool = True,
        codec: Codec | None = None,
    ) -> None:
        self.flats, self.communicator = list(flats), communicator
        self.reduction, self.overlap, self.codec = reduction, overlap, codec
        expected: list[tuple[int, int, int]] = []
        for f, flat in enumerate(self.flats):
            for number, bucket in enumerate(flat.partition.buckets):
                expected.append((max(positions[f][i] for i in bucket.members), f, number))
        order = [(f, number) for _, f, number in sorted(expected)]
        self.buckets = [
            ReduceScatterBucket(
                self.flats[f], number, keeps=keeps if isinstance(keeps, bool) else keeps[f]
            )
            for f, number in order
        ]
        index_of = {key: index for index, key in enumerate(order)}
        self.of_flat = [
            [self.buckets[index_of[f, number]] for number in range(len(flat.partition.buckets))]
            for f, flat in enumerate(self.flats)
        ]
        self._indices_of = {
            id(flat): [index_of[f, number] for number in range(len(flat.partition.buckets))]
            for f, flat in enumerate(self.flats)
        }
        self._complete: set[int] = set()  # ids of the parameters that `reduce` was called with
        self._unfinished: deque[ReduceScatterBucket] = deque()
        self.before_backward: Callable[[int | None], None] = lambda number: None
        self.after_reducing: Callable[[], None] = lambda: None
        members = []
        for f, flat in enumerate(self.flats):
            bucket_of = {
                member: index_of[f, number]
                for number, bucket in enumerate(flat.partition.buckets)
                for member in bucket.members
            }
            for i, parameter in enumerate(flat.parameters):
                store = partial(self.buckets[bucket_of[i]].store, i)
                members.append(BucketMember(parameter, flat.names[i], bucket_of[i], store))
        self._hooks = GradientBuckets(members, len(self.buckets), self, automatic=automatic)

    @property
    def synchronizes(self) -> bool:
        """Whether backward reduces gradients over the ranks; settable."""
        return self._hooks.synchronizes

    @synchronizes.setter
    def synchronizes(self, value: bool) -> None:
        self._hooks.synchronizes = value

    @property
    def used(self) -> bytearray:
        """One byte for each parameter: whether a gradient of it has arrived since `clear()`."""
        return self._hooks.used

    @property
    def pending(self) -> bool:
        """Whether backwards within no_sync() have left gradients that are not reduced."""
        return any(bucket.whole is not None for bucket in self.buckets)

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        self._hooks.remove()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block, backward only adds gradients up locally, whole."""
        return self._hooks.no_sync()

    def clear(self) -> None:
        """Forget all gradients."""
        self.finish_reducing()
        for bucket in self.buckets:
            bucket.clear()
        with without_torch_function():
            for flat in self.flats:
                for parameter in flat.parameters:
                    parameter.grad = None
        self._hooks.reset()
        self._unfinished.clear()

    def prepare(self) -> None:
        """Forget a backward that was broken off; call it before each forward.

        Raises:
            RuntimeError: Buckets of the broken-off backward are on their way, or the model is
                wrapped in DistributedDataParallel.
        """
        if in_backward():  # a forward that backward itself runs again
            return
        if DistributedDataParallel._active_ddp_module is not None:
            raise wrapped_in_ddp()
        self._hooks.prepare()

    @torch.no_grad()
    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start reducing the buckets of these parameters before the backwards of a step have ended.

        Backwards within no_sync() have left their gradients whole, and no more of them come before
        the step. A bucket with other parameters waits for those. Collective: all ranks call it in
        the same order.
        """
        self._complete |= {id(p) for p in parameters}
        started = self._hooks.started_early
        for index, bucket in enumerate(self.buckets):
            if index in started or not all(
                id(bucket.flat.parameters[i]) in self._complete for i in bucket.members
            ):
                continue
            self._start(index)
            started.add(index)
            if not self.overlap:
                bucket.finish()

    @torch.no_grad()
    def finish_reducing(self) -> None:
        """Wait for what `reduce` started."""
        started = self._hooks.started_early
        if self.overlap:
            for index in started:
                self.buckets[index].finish()
        started.clear()
        self._complete.clear()

    def flush(self, *, absent: bool = False) -> None:
        """Reduce what backwards within no_sync() left whole, where none outside came after them.

        Args:
            absent: Whether to do so, with zeros, also where no backward has left anything.
        """
        if (self.pending or absent) and not self._hooks.active:
            self._hooks.reduce_now()

    def start(self, bucket: int) -> None:
        """Called by `GradientBuckets`: start the reduce-scatter of a bucket."""
        with torch.no_grad():
            # Each one on its way holds the memory of a whole bucket at stage 2.
            while len(self._unfinished) >= ON_THEIR_WAY:
                self._unfinished.popleft().finish()
            self._start(bucket)
            if self.overlap:
                self._unfinished.append(self.buckets[bucket])
            else:
                self.buckets[bucket].finish()

    def start_flat(self, flat: FlatParameters) -> None:
        """Reduce the gradients of these parameters now, in backward; missing ones count as zero.

        Does nothing within no_sync().
        """
        if self._hooks.synchronizes:
            self._hooks.activate()
            for index in self._indices_of[id(flat)]:
                self._hooks.start(index)

    def begin_backward(self, number: int | None) -> None:
        """Called by `GradientBuckets`."""
        self.before_backward(number)
        self._unfinished.clear()

    def finish(self) -> None:
        """Called by `GradientBuckets`: start the buckets that waited for unused parameters, then
        wait for all."""
        self._hooks.start_rest()
        while self._unfinished:
            self._unfinished.popleft().finish()
        self.after_reducing()

    def _start(self, index: int) -> None:
        self.buckets[index].start(
            self.communicator,
            reduction=self.reduction,
            async_op=self.overlap,
            label=f"gradients, bucket {index} of {len(self.buckets)}",
            codec=self.codec,
        )
