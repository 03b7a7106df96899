"""Gradients reduce-scattered while backward runs: a bucket leaves when its last gradient is there,
and one chunk of it stays.

    autograd      [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]  backward() returns
    whole         |==== bucket 0 ========|======= bucket 1 ====|== bucket 2 ====|      from its first gradient on ...
    reduce-scatter                       [---- 0 ----]         [---- 1 ----]    [-2-]  ... until it is reduced
    chunk                                             |========================>      1 / ranks of it, until the step

A hook copies each gradient into its bucket while it is in the cache, and `.grad` becomes a view
there, or None once the bucket has left. Buckets leave in one order on every rank. Stage 1 keeps the
memory of all buckets, stage 2 that of those on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce, reduce_scatter
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_reduce_scatter
from pyops.zero.hooks.reduced_gradient import ReducedGradient
from pyops.zero.layout.parameters import FlatParameters
from pyops.zero.layout.partition import Piece
from pyops.zero.layout.wire import speaks

__all__ = ["GradientBucket", "Gradients", "wrapped_in_ddp"]

ON_THEIR_WAY = 2  # buckets whose reduce-scatter may be unfinished while another one is filled


def wrapped_in_ddp() -> RuntimeError:
    return RuntimeError(
        "the model is wrapped in DistributedDataParallel, and ZeroOptimizer reduces its "
        "gradients already: use the model by "
        "itself; with Accelerate pyops.hf.prepare(accelerator, model, optimizer), with "
        "transformers pyops.hf.ZeroTrainer"
    )


class GradientBucket:
    """The gradient of one bucket of parameters.

    whole: this rank's gradient, None while there is none. chunk: the reduced gradient of what this
    rank owns, None likewise. keeps: whether the memory of `whole` stays.
    """

    def __init__(self, flat: FlatParameters, number: int, *, keeps: bool) -> None:
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
        self._memory = self._allocate() if keeps else None
        self.whole: Tensor | None = None
        self.chunk: Tensor | None = None
        self._before: Tensor | None = None
        self._views: dict[int, Tensor] = {}
        self._work: Work | None = None
        self._coded = False

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
        whole = torch.empty(self.numel, dtype=self.flat.dtype, device=self.flat.device)
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

    def accept(self, index: int) -> None:
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
        """Whether somebody took away what backwards within no_sync() had left. arriving: another
        gradient is in its place."""
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
        op: str,
        async_op: bool,
        label: str,
        codec: Codec | None = None,
    ) -> None:
        """Start the reduce-scatter, of the codec's numbers where there is one. Parameters without a
        gradient count as zero."""
        if self.whole is None:
            self.whole = self._memory if self._memory is not None else self._allocate()
            if self._memory is not None and self.chunk is not None:
                self.chunk = self.chunk.clone()
        self.fill()
        self._forget_views()
        self._before = self.chunk
        own = self.whole[self._own]
        self._work = None
        if communicator is None:
            self.chunk = own
            return
        common: dict[str, Any] = {
            "op": op,
            "async_op": async_op,
            "label": label,
            "communicator": communicator,
        }
        if self.flat.partition.ranks == 1:  # every rank owns everything
            self.chunk, work = own, all_reduce(self.whole, offset=self._start, **common)
        elif codec is not None and speaks(codec, self.flat.dtype):
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
        if self._before is not None:
            assert self.chunk is not None
            self.chunk.add_(self._before)
        self._before = self.whole = None

    def _forget_views(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # of parameters that are spread at stage 3
            for index in self._views:
                self.flat.parameters[index].grad = None
        self._views.clear()

    def clear(self) -> None:
        """Forget the gradient."""
        self._forget_views()
        self.whole = self.chunk = self._before = self._work = None
        self._coded = False


class Gradients:
    """Hooks on the parameters of `flats`, and the order in which their buckets are reduced.

    flats: with the buckets of each. communicator: None where one rank runs alone. keeps: stage 1,
    the memory of whole gradients stays. overlap: reduce while backward goes on, or backward waits
    for each bucket. positions[f][i]: when the gradient of parameter i of flats[f] is expected, as a
    rank among all. automatic: buckets leave as they are complete, in one order; else when `start`
    says so, and the rest at the end of backward. codec: what gradients travel as, None for as they
    are.

    After backward() the chunks of all buckets are final, and `.grad` of the parameters is a
    ReducedGradient; what several backwards bring adds up until `clear()`. Within `no_sync()`
    gradients stay whole, in `.grad`.
    """

    def __init__(
        self,
        flats: Sequence[FlatParameters],
        communicator: Communicator | None,
        *,
        keeps: bool,
        op: str,
        overlap: bool,
        positions: Sequence[Sequence[int]],
        automatic: bool = True,
        codec: Codec | None = None,
    ) -> None:
        self.flats, self.communicator, self.op, self.overlap = (
            list(flats),
            communicator,
            op,
            overlap,
        )
        self.automatic, self.codec = automatic, codec
        self.synchronises = True
        expected: list[tuple[int, int, int]] = []
        for f, flat in enumerate(self.flats):
            for number, bucket in enumerate(flat.partition.buckets):
                expected.append((max(positions[f][i] for i in bucket.members), f, number))
        self.buckets = [
            GradientBucket(self.flats[f], number, keeps=keeps) for _, f, number in sorted(expected)
        ]
        place = self._place = {
            (id(bucket.flat), bucket.number): i for i, bucket in enumerate(self.buckets)
        }
        self.of_flat = [
            [self.buckets[place[id(flat), n]] for n in range(len(flat.partition.buckets))]
            for flat in self.flats
        ]
        self._numbers = {
            (f, i): n
            for n, (f, i) in enumerate(
                (f, i) for f, flat in enumerate(self.flats) for i in range(len(flat.parameters))
            )
        }
        self.used = bytearray(len(self._numbers))  # since the last clear()
        self._complete: set[int] = (
            set()
        )  # ids of parameters whose gradients `reduce` was told to be
        self._leaving: dict[
            int, GradientBucket
        ] = {}  # buckets that left before the last backward was over
        self._active = False
        self.before_backward: Callable[[int | None], None] = lambda number: (
            None
        )  # when its first gradient arrives, this one
        self.after_reducing: Callable[[], None] = lambda: None
        self._begin()
        self._hooks = []
        for f, flat in enumerate(self.flats):
            bucket_of = {
                index: place[id(flat), n]
                for n, b in enumerate(flat.partition.buckets)
                for index in b.members
            }
            for index, parameter in enumerate(flat.parameters):
                hook = self._hook(bucket_of[index], index, self._numbers[f, index])
                self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def was_used(self, flat: int, index: int) -> bool:
        """Whether the parameter got a gradient on this rank since the last `clear()`."""
        return bool(self.used[self._numbers[flat, index]])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward only adds gradients up locally, whole."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    def clear(self) -> None:
        """Forget all gradients."""
        self.finish_reducing()
        for bucket in self.buckets:
            bucket.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self.flats:
                for parameter in flat.parameters:
                    parameter.grad = None
        self.used = bytearray(len(self._numbers))
        self._active = False
        self._begin()

    def prepare(self) -> None:
        """Forget a backward that was broken off; call before each forward. RuntimeError if its
        buckets are on their way."""
        if torch._C._current_graph_task_id() != -1:  # a forward that backward itself runs again
            return
        if DistributedDataParallel._active_ddp_module is not None:
            raise wrapped_in_ddp()
        if self._active and any(self._left):
            raise RuntimeError(
                f"the last backward ended with an error after {sum(self._left)} of "
                f"{len(self.buckets)} buckets had left, so "
                "the ranks no longer agree on what comes next; restart from a checkpoint"
            )
        self._active = False

    @torch.no_grad()
    def reduce(self, parameters: Iterable[nn.Parameter]) -> None:
        """Start reducing the buckets of these parameters, whose gradients backwards within
        no_sync() have left whole, and of which no more come before the step; a bucket with others
        waits for them. On all ranks in the same order."""
        self._complete |= {id(p) for p in parameters}
        for place, bucket in enumerate(self.buckets):
            if place in self._leaving or not all(
                id(bucket.flat.parameters[i]) in self._complete for i in bucket.members
            ):
                continue
            label = f"gradients, bucket {place} of {len(self.buckets)}"
            bucket.start(
                self.communicator, op=self.op, async_op=self.overlap, label=label, codec=self.codec
            )
            self._leaving[place] = bucket
            if not self.overlap:
                bucket.finish()

    @torch.no_grad()
    def finish_reducing(self) -> None:
        """Wait for what `reduce` started."""
        for bucket in self._leaving.values() if self.overlap else ():
            bucket.finish()
        self._leaving.clear()
        self._complete.clear()

    def flush(self) -> None:
        """Reduce what backwards within no_sync() left whole, where no backward outside of it came
        after them."""
        if any(bucket.whole is not None for bucket in self.buckets) and not self._active:
            self._begin()
            self._finish_all()

    def _begin(self) -> None:
        self._missing = [len(bucket.members) for bucket in self.buckets]
        self._arrived = bytearray(len(self._numbers))
        self._left = bytearray(len(self.buckets))
        self._next = 0
        self._unfinished: deque[GradientBucket] = deque()

    def _hook(self, place: int, index: int, number: int) -> Callable[[nn.Parameter], None]:
        bucket = self.buckets[place]
        accept = partial(bucket.accept, index)

        def arrived(_: nn.Parameter) -> None:
            self._activate(number)
            if self._left[place] or place in self._leaving:
                raise RuntimeError(
                    f"a gradient of {bucket.flat.names[index]} arrived after its bucket "
                    f"{place} had left; if the model uses "
                    "torch.utils.checkpoint, pass use_reentrant=False"
                )
            with torch.no_grad():
                accept()
            self.used[number] = 1
            if not self._arrived[number]:
                self._arrived[number] = 1
                self._missing[place] -= 1
                if self.synchronises and self.automatic:
                    while self._next < len(self.buckets) and self._missing[self._next] == 0:
                        self._start(self._next)
                        self._next += 1

        return arrived

    def _activate(self, number: int | None = None) -> None:
        if not self._active:
            self._active = True
            self.before_backward(number)
            self._begin()
            Variable._execution_engine.queue_callback(self._finish)  # type: ignore[attr-defined]

    def start(self, flat: FlatParameters) -> None:
        """Reduce the gradients of these parameters now, in backward; what has none counts as zero.
        Not within no_sync()."""
        if self.synchronises:
            self._activate()
            for number in range(len(flat.partition.buckets)):
                if not self._left[self._place[id(flat), number]]:
                    self._start(self._place[id(flat), number])

    @torch.no_grad()
    def _start(self, place: int) -> None:
        bucket = self.buckets[place]
        while len(self._unfinished) >= ON_THEIR_WAY:
            self._unfinished.popleft().finish()
        label = f"gradients, bucket {place} of {len(self.buckets)}"
        bucket.start(
            self.communicator, op=self.op, async_op=self.overlap, label=label, codec=self.codec
        )
        self._left[place] = 1
        self._unfinished.append(bucket)
        if not self.overlap:
            self._unfinished.popleft().finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over."""
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "a backward that runs within another one ended before it, and would have "
                "reduced gradients that are not there "
                "yet; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
            )
        if self.synchronises:
            self._finish_all()
        self._active = False

    def _finish_all(self) -> None:
        """Start the buckets that waited for unused parameters, then wait for all."""
        for place, left in enumerate(self._left):
            if not left:
                self._start(place)
        while self._unfinished:
            self._unfinished.popleft().finish()
        self.after_reducing()
