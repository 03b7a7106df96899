"""Gradients summed over ranks while backward is still running.

    autograd      [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]
    buckets                        `- 0 -----.           `- 1 ----.     `- 2 -.  `- 3 -.
    collective                        [ all-reduce 0 ]   [ all-reduce 1 ][ 2 ][ 3 ]

A bucket leaves as soon as its last gradient has arrived. autograd makes a fresh gradient where
.grad is None (torch's default after zero_grad); a hook copies it into its view of the flat buffer
while it is in the cache, so the buffer needs no zeroing and no addition. Where .grad is the view,
autograd adds to it in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NoReturn

import torch

from pyops.comm.buckets.bucket import plan_buckets
from pyops.comm.buckets.bucket_errors import BucketErrors
from pyops.comm.buckets.gradient_buckets import BucketMember, GradientBuckets
from pyops.comm.buckets.kept_elements import KeptElements, carry_errors
from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.comm.collectives.communicator import Communicator
from pyops.comm.collectives.functional import all_reduce
from pyops.comm.collectives.work import Work
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.compressed import compressed_all_reduce
from pyops.flat import FlatBuffer
from pyops.protocols import CollectiveCodec
from pyops.renamed import refuse_renamed

__all__ = ["Reducer"]


class Reducer:
    """Sums (or averages) the gradients of flat buffers over the ranks, by bucket, during backward.

    After backward() the gradients are final. A parameter that took part on no rank keeps .grad as
    it was (None, say); one that took part on some rank has the same gradient on every rank.
    `no_sync()` lets gradients add up locally; the next backward outside of it sums all that has
    been added. With reduction="sum", clear the gradients between two backwards that communicate:
    what is left of the first would be summed again.

    Args:
        buffers: FlatBuffers, whose parameters get hooks.
        communicator: None where one rank runs alone; gradients are then only put into the buffers.
        bucket_bytes: The most that a bucket holds.
        algorithm: As for `pyops.comm.all_reduce`.
        reduction: "mean" or "sum".
        positions: See `plan_buckets`.
        codec: Compresses the buckets; what that leaves out is kept in `errors` and added the next
            time. None sends them exactly. One rank alone compresses nothing.

    Attributes:
        buckets: The plan, in the order in which buckets are reduced.
        errors: The error feedback of each bucket; None without a codec, or for one rank alone.
        look: Called before anything is reduced in a backward, unless forward has called it; returns
            the error for which this rank leaves the group. None: nothing is looked for.
        own: {number of a buffer: the ranks over which it is summed} where these are not all of
            `communicator`; none at first, and never with a codec.
        epilogue: Called with each bucket's number when its gradients are summed, before anybody
            sees them: a mask is applied there. None: nothing is.

    Raises:
        ValueError: reduction is neither "mean" nor "sum", or bucket_bytes is below 1.
        RuntimeError: During backward, where a part of the graph runs a backward of its own, as
            torch.utils.checkpoint does with use_reentrant=True, and it ends first, or brings a
            gradient after its bucket has left.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        communicator: Communicator | None,
        *,
        bucket_bytes: int = 25 << 20,
        algorithm: str = "auto",
        reduction: str = "mean",
        positions: Sequence[Sequence[int]] | None = None,
        codec: Codec | None = None,
        **unknown: object,
    ) -> None:
        refuse_renamed("Reducer", unknown, {"op": "reduction"})
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; choose 'mean' or 'sum'")
        self.buffers, self.communicator = list(buffers), communicator
        self.algorithm, self.reduction = algorithm, reduction
        self.buckets = plan_buckets(
            [b.layout for b in self.buffers],
            item_sizes=[b.data.element_size() for b in self.buffers],
            bucket_bytes=bucket_bytes,
            positions=positions,
        )
        self.codec = codec
        self._kept: KeptElements | None = None
        self._sent: dict[int, torch.Tensor] = {}
        self.errors = self._new_errors(None)
        bucket_of = {(b.buffer, p): i for i, b in enumerate(self.buckets) for p in b.parameters}
        self._numbering = [
            (b, p) for b, buffer in enumerate(self.buffers) for p in range(len(buffer))
        ]
        # Which parameters took part on some rank, filled in for each communication.
        self._used = torch.zeros(
            len(self._numbering), dtype=torch.int32, device=self.buffers[0].data.device
        )
        self.look: Callable[[], Exception | None] | None = None
        self.looked = False
        self.own: Mapping[int, OwnRanks] = {}
        self.epilogue: Callable[[int], None] | None = None
        self._works: list[Work | None] = []
        members = [
            BucketMember(
                parameter=self.buffers[b].parameters[p],
                name=self.buffers[b].names[p],
                bucket=bucket_of[b, p],
                store=partial(self.buffers[b].restore_gradient, p),
            )
            for b, p in self._numbering
        ]
        self._hooks = GradientBuckets(members, len(self.buckets), self)

    def _new_errors(self, kept: KeptElements | None) -> BucketErrors | None:
        if self.codec is None or self.communicator is None:
            return None
        return BucketErrors(
            self.codec,
            self.buckets if kept is None else kept.buckets,
            layouts=[b.layout for b in self.buffers] if kept is None else kept.layouts,
            rank=self.communicator.rank,
            size=self.communicator.size,
            devices=[b.data.device for b in self.buffers],
        )

    def send_only(self, alive: Sequence[Mapping[int, torch.Tensor]] | None) -> None:
        """Let the codec send only some elements, and have 0 in place of the others; without a codec
        everything is sent as it is. Errors of what is still sent are taken over.

        Args:
            alive: For each buffer {number of a parameter: bool, flat, of its elements}; of other
                parameters everything is sent. None: everything, as in the beginning. The same on
                all ranks.

        Raises:
            ValueError: The codec sends no elements, but whole matrices.
        """
        if self.errors is None:
            return
        if alive is not None and isinstance(self.codec, CollectiveCodec):
            raise ValueError(
                f"{self.errors.codec.name} sends whole matrices, of which no elements can be left "
                "out; use a codec of elements, such as pyops.comm.OneBit() or Int8()"
            )
        kept = None if alive is None else KeptElements(self.buckets, self.buffers, alive)
        errors = self._new_errors(kept)
        assert errors is not None
        carry_errors(self.errors, errors, before=self._kept, after=kept)
        self.errors, self._kept = errors, kept

    @property
    def synchronizes(self) -> bool:
        """Whether backward sums gradients over the ranks; settable."""
        return self._hooks.synchronizes

    @synchronizes.setter
    def synchronizes(self, value: bool) -> None:
        self._hooks.synchronizes = value

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        self._hooks.remove()

    def leave(self, error: Exception) -> NoReturn:
        """Raise `error` on this rank; the others are told in their next reduction."""
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
            self.errors.load_state_dict(state, op=self.reduction)

    def no_sync(self) -> AbstractContextManager[None]:
        """Within the block, backward only adds gradients up locally."""
        return self._hooks.no_sync()

    def prepare(self, *, looked: bool = True) -> None:
        """Forget a backward that was broken off; call it before each forward.

        Args:
            looked: Whether the caller has called `look`; if not, backward does.

        Raises:
            RuntimeError: Buckets of the broken-off backward are on their way.
        """
        self._hooks.prepare()
        self.looked = looked

    def begin_backward(self, number: int | None) -> None:
        """Called by `GradientBuckets`. Leaves the group, before anything is reduced, for an error
        that forward has not looked for: a compiled forward does not look."""
        if self.look is not None and not self.looked and (error := self.look()) is not None:
            self.leave(error)
        self.looked = False
        self._works = []

    def start(self, bucket: int) -> None:
        """Called by `GradientBuckets`: start the all-reduce of a bucket."""
        found = self.buckets[bucket]
        gradient = self.buffers[found.buffer].grad[found.start : found.stop]
        label = f"bucket {bucket} of {len(self.buckets)}"
        if self.errors is None:
            own = self.own.get(found.buffer)
            over = self.communicator if own is None else own.communicator
            self._works.append(
                self._all_reduce(
                    gradient, over=over, op=self.reduction, offset=found.start, label=label
                )
            )
            return
        if self._kept is not None:
            gradient = self._sent[bucket] = self._kept.gather(bucket, gradient)
        self._works.append(
            compressed_all_reduce(
                gradient,
                codec=self.errors.codec,
                error=self.errors[bucket],
                communicator=self.communicator,
                op=self.reduction,
                async_op=True,
                label=label,
            )
        )

    def _all_reduce(
        self, tensor: torch.Tensor, *, over: Communicator | None, op: str, offset: int, label: str
    ) -> Work | None:
        if over is None:
            return None
        work: Work = all_reduce(
            tensor,
            communicator=over,
            op=op,
            algorithm=self.algorithm,
            async_op=True,
            offset=offset,
            label=label,
        )
        return work

    def _sum_used(self, absent: list[int]) -> Work | None:
        """Sum over the ranks which parameters took part. Does not wait for a GPU where all did, as
        nearly always."""
        if self.communicator is None:
            return None
        if absent:
            self._used.copy_(torch.frombuffer(self._hooks.used, dtype=torch.uint8))
        else:
            self._used.fill_(1)
        return self._all_reduce(
            self._used,
            over=self.communicator,
            op="sum",
            offset=0,
            label="which parameters took part",
        )

    def _wait(self, absent: list[int]) -> None:
        """Sum which parameters took part, wait for all, and make means those over all ranks."""
        for work in [*self._works, self._sum_used(absent)]:
            if work is not None:
                work.wait()
        if self.reduction == "mean":
            for b, own in self.own.items():
                self.buffers[b].grad.mul_(own.share)

    def _arrive(self, absent: list[int]) -> None:
        """Wait for all buckets, and finish their gradients."""
        self._wait(absent)
        for index, bucket in enumerate(self.buckets):
            gradient = self.buffers[bucket.buffer].grad[bucket.start : bucket.stop]
            if index in self._sent:
                assert self._kept is not None
                self._kept.scatter(index, gradient, self._sent.pop(index))
            elif self.errors is not None:
                self.errors.clear_padding(index, gradient)
            if self.epilogue is not None:
                self.epilogue(index)

    def finish(self) -> None:
        """Called by `GradientBuckets`: start the buckets that waited for unused parameters, then
        wait for all."""
        absent = [number for number, used in enumerate(self._hooks.used) if not used]
        absent_before: dict[int, torch.Tensor | None] = {}
        errors_before: dict[int, list[torch.Tensor]] = {}
        for number in absent:
            b, p = self._numbering[number]
            if self.errors is not None:
                errors_before[number] = self.errors.keep(b, p)
            gradient = self.buffers[b].parameters[p].grad
            # A copy, because its place in the buffer is summed with its bucket.
            absent_before[number] = None if gradient is None else gradient.clone()
            self.buffers[b].restore_gradient(p)
        self._hooks.start_rest()
        self._arrive(absent)
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
        self._hooks.forget_used()
        self._works = []
