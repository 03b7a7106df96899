"""Gradients summed over ranks while backward is still running: each bucket leaves as soon as its
last gradient arrives.

    autograd      [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]  backward() returns
    buckets                        `- 0 -----.           `- 1 ----.     `- 2 -.  `- 3 -.   ^
    collective                        [ all-reduce 0 ]   [ all-reduce 1 ][ 2 ][ 3 ]----'

autograd makes a fresh gradient where .grad is None (torch's default after zero_grad); a hook copies
it into its view of the flat buffer while it is in the cache, so the buffer needs no zeroing and no
addition. Where .grad is the view, autograd adds to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd import Variable

from pyops.comm.buckets.bucket import plan_buckets
from pyops.comm.buckets.bucket_errors import BucketErrors
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.flat import FlatBuffer

__all__ = ["Reducer"]


class Reducer:
    """Sums (or averages) the gradients of flat buffers over the ranks of a communicator, bucket by
    bucket, during backward.

    buffers: FlatBuffers whose parameters get hooks. communicator: None where one rank runs alone;
    gradients then only find their way into the buffers. op: "mean" or "sum". algorithm: as for
    `pyops.comm.all_reduce`.
    bucket_bytes: the most that a bucket holds. positions: see `plan_buckets`. codec: buckets travel
    compressed, and what that leaves out is kept in `errors` and added the next time; None: exactly.
    One rank alone compresses nothing.

    After backward() the gradients are final. A parameter that took part on no rank keeps .grad as
    it was (None, say); one that took part on some rank has the same gradient on every rank.
    `no_sync()` lets gradients add up locally; the next backward outside of it sums all that has
    been added. With op="sum", clear the gradients between two backwards that communicate: what is
    left of the first would be summed again.

    Raises RuntimeError during backward when a part of the graph runs a backward of its own, as
    torch.utils.checkpoint does with use_reentrant=True, and it ends first, or brings a gradient
    after its bucket has left.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        communicator: Communicator | None,
        *,
        bucket_bytes: int = 25 << 20,
        algorithm: str = "auto",
        op: str = "mean",
        positions: Sequence[Sequence[int]] | None = None,
        codec: Codec | None = None,
    ) -> None:
        if op not in ("mean", "sum"):
            raise ValueError(f"op is {op!r}; choose 'mean' or 'sum'")
        self.buffers, self.communicator, self.algorithm, self.op = (
            list(buffers),
            communicator,
            algorithm,
            op,
        )
        self.buckets = plan_buckets(
            [b.layout for b in self.buffers],
            item_sizes=[b.data.element_size() for b in self.buffers],
            bucket_bytes=bucket_bytes,
            positions=positions,
        )
        self.codec = codec
        self.errors: BucketErrors | None = None
        if codec is not None and communicator is not None:
            self.errors = BucketErrors(
                codec,
                self.buckets,
                layouts=[b.layout for b in self.buffers],
                rank=communicator.rank,
                size=communicator.size,
                devices=[b.data.device for b in self.buffers],
            )
        self.synchronises = True
        self._bucket_of = {
            (b.buffer, p): i for i, b in enumerate(self.buckets) for p in b.parameters
        }
        numbering = [(b, p) for b, buffer in enumerate(self.buffers) for p in range(len(buffer))]
        self._number = {key: i for i, key in enumerate(numbering)}
        self._numbering = numbering
        # Used since the last communication, so that a parameter of an earlier no_sync backward
        # counts.
        self._used = torch.zeros(
            len(numbering), dtype=torch.int32, device=self.buffers[0].data.device
        )
        self._used_here = bytearray(len(numbering))
        self._active = False
        self.look: Callable[[], Exception | None] | None = (
            None  # for what is wrong with the parameters, before a reduction
        )
        self.looked = False  # since the last backward began
        self._begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(b, p))
            for b, buffer in enumerate(self.buffers)
            for p, parameter in enumerate(buffer.parameters)
        ]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def leave(self, error: Exception) -> NoReturn:
        """Raise `error` on this rank; the others hear of it in their next reduction."""
        if self.communicator is not None:
            self.communicator.leave(error, device=self.buffers[0].data.device)
        raise error

    def communication_state(self) -> dict[str, Any]:
        """The errors of compression by parameter name (see `BucketErrors`); {} where nothing is
        compressed."""
        return {} if self.errors is None else self.errors.state_dict()

    def check_communication_state(self, state: Mapping[str, Any]) -> None:
        """ValueError for a state that can't be loaded here."""
        if self.errors is not None:
            self.errors.check(state)
        elif self.codec is None and state:
            raise ValueError(
                f"the communication state is of codec {state.get('codec')}, this run "
                "uses none; use that codec, or go on "
                "without the state"
            )

    def load_communication_state(self, state: Mapping[str, Any]) -> None:
        """Take up the errors that `communication_state` gave. One rank alone has no use for
        them."""
        if self.errors is not None:
            self.errors.load_state_dict(state, op=self.op)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward only adds gradients up locally."""
        before, self.synchronises = self.synchronises, False
        try:
            yield
        finally:
            self.synchronises = before

    def prepare(self, *, looked: bool = True) -> None:
        """Forget a backward that was broken off; call before each forward. RuntimeError if its
        buckets are on their way.

        looked: whether the caller has looked at the parameters; if not, backward does.
        """
        if self._active and self._works:
            raise RuntimeError(
                f"the last backward ended with an error after {len(self._works)} of "
                f"{len(self.buckets)} buckets had left, so "
                "the ranks no longer agree on what comes next; restart from a checkpoint"
            )
        self._active, self.looked = False, looked

    def _check(self) -> None:
        """Leave, before anything is reduced, for an error that was not looked for in forward:
        compiled ones don't look."""
        if self.look is not None and not self.looked and (error := self.look()) is not None:
            self.leave(error)
        self.looked = False

    def _begin(self) -> None:
        """A backward begins: nothing has arrived, nothing has left."""
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        self._arrived = bytearray(len(self._numbering))
        self._works: list[Any] = []

    def _hook(self, buffer: int, index: int) -> Callable[[nn.Parameter], None]:
        number, bucket = self._number[buffer, index], self._bucket_of[buffer, index]
        restore = partial(self.buffers[buffer].restore_gradient, index)

        def arrived(_: nn.Parameter) -> None:
            if not self._active:
                self._check()
                self._active = True
                self._begin()
                Variable._execution_engine.queue_callback(self._finish)
            if bucket < len(self._works):
                raise RuntimeError(
                    f"a gradient of {self.buffers[buffer].names[index]} arrived after "
                    f"its bucket {bucket} had left; if the "
                    "model uses torch.utils.checkpoint, pass use_reentrant=False"
                )
            restore()
            self._used_here[number] = 1
            if not self._arrived[number]:
                self._arrived[number] = 1
                self._missing[bucket] -= 1
                if self.synchronises:
                    self._launch_ready()

        return arrived

    def _launch_ready(self) -> None:
        """Launch every bucket that is complete and whose turn it is."""
        while len(self._works) < len(self.buckets) and self._missing[len(self._works)] == 0:
            self._launch(len(self._works))

    def _launch(self, index: int) -> None:
        bucket = self.buckets[index]
        gradient = self.buffers[bucket.buffer].grad[bucket.start : bucket.stop]
        label = f"bucket {index} of {len(self.buckets)}"
        if self.errors is None:
            self._works.append(
                self._all_reduce(gradient, op=self.op, offset=bucket.start, label=label)
            )
            return
        self._works.append(
            compressed_all_reduce(
                gradient,
                codec=self.errors.codec,
                error=self.errors[index],
                communicator=self.communicator,
                op=self.op,
                async_op=True,
                label=label,
            )
        )

    def _all_reduce(self, tensor: torch.Tensor, *, op: str, offset: int, label: str) -> Any:
        if self.communicator is None:
            return None
        return all_reduce(
            tensor,
            communicator=self.communicator,
            op=op,
            algorithm=self.algorithm,
            async_op=True,
            offset=offset,
            label=label,
        )

    def _tell_used(self, absent: list[int]) -> Any:
        """Sum over the ranks which parameters took part. Does not wait for a GPU where all did, as
        nearly always."""
        if self.communicator is None:
            return None
        if absent:
            self._used.copy_(torch.frombuffer(self._used_here, dtype=torch.uint8))
        else:
            self._used.fill_(1)
        return self._all_reduce(self._used, op="sum", offset=0, label="which parameters took part")

    @torch.no_grad()
    def _finish(self) -> None:
        """Backward is over: launch the buckets that waited for unused parameters, then wait for
        all."""
        if torch._C._current_autograd_node() is not None:
            raise RuntimeError(
                "a backward that runs within another one ended before it, and would have "
                "reduced gradients that are not there "
                "yet; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
            )
        if not self.synchronises:
            self._active = False
            return
        absent = [number for number, used in enumerate(self._used_here) if not used]
        absent_before: dict[int, torch.Tensor | None] = {}
        errors_before: dict[int, list[torch.Tensor]] = {}
        for number in absent:
            b, p = self._numbering[number]
            if self.errors is not None:
                errors_before[number] = self.errors.keep(b, p)
            gradient = self.buffers[b].parameters[p].grad
            absent_before[number] = (
                None if gradient is None else gradient.clone()
            )  # its place is summed with its bucket
            self.buffers[b].restore_gradient(p)
        while len(self._works) < len(self.buckets):
            self._launch(len(self._works))
        for work in [*self._works, self._tell_used(absent)]:
            if work is not None:
                work.wait()
        if self.errors is not None:
            for index, bucket in enumerate(self.buckets):
                self.errors.clear_padding(
                    index, self.buffers[bucket.buffer].grad[bucket.start : bucket.stop]
                )
        if absent:
            everywhere = (
                [0] * len(self._numbering) if self.communicator is None else self._used.tolist()
            )
            for number in absent:
                if not everywhere[number]:
                    b, p = self._numbering[number]
                    if self.errors is not None:
                        self.errors.put_back(b, p, errors_before[number])
                    self.buffers[b].parameters[p].grad = absent_before[number]
                    if absent_before[number] is not None:
                        self.buffers[b].restore_gradient(p)
        self._used_here = bytearray(len(self._numbering))
        self._works = []
        self._active = False
