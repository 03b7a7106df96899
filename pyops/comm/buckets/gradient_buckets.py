"""When a gradient bucket is reduced: hooks on the parameters, and one order on all ranks.

    autograd      [ head ][ block 3 ][ block 2 ][ block 1 ][ block 0 ][ embedding ]  backward() ends
    store           |       |          |          |          |          |             |
    start                   0                     1          2          3             |
    finish                                                                            wait for all

A strategy says what reducing a bucket means: an all-reduce of a slice of a flat buffer (`Reducer`),
or a reduce-scatter into this rank's part of it (`pyops.zero`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from pyops.torch_private import after_backward, in_autograd_node

__all__ = ["BucketMember", "BucketStrategy", "GradientBuckets"]


@dataclass(frozen=True)
class BucketMember:
    """A parameter whose gradient is reduced with those of its bucket."""

    parameter: nn.Parameter
    name: str
    bucket: int
    """The number of its bucket."""
    store: Callable[[], object]
    """Puts `parameter.grad` into the memory of the bucket."""


class BucketStrategy(Protocol):
    """How the buckets of a `GradientBuckets` are reduced."""

    def begin_backward(self, number: int | None) -> None:
        """Called before anything is stored in a backward.

        Args:
            number: The member whose gradient has arrived first; None where `start` came first.
        """

    def start(self, bucket: int) -> None:
        """Start to reduce a bucket. Members without a gradient count as zero."""

    def finish(self) -> None:
        """Called at the end of a backward that reduces: call `start_rest`, then wait for all."""


class GradientBuckets:
    """Hooks that store each gradient in its bucket, and start the buckets during backward.

    Buckets start in the order of their numbers on every rank, whichever is complete first, so that
    the collectives of the ranks always match.

    Args:
        members: The parameters, each once.
        num_buckets: The number of buckets; every bucket has a member.
        strategy: How a bucket is reduced.
        automatic: Whether a bucket starts when its last gradient has arrived; otherwise `start`
            is called for it, or the end of backward starts it.

    Attributes:
        synchronizes: Whether backward reduces gradients, or only adds them up locally.
        used: One byte for each member: whether a gradient of it has arrived since `forget_used`.
        started_early: The buckets that were started before the backwards of a step had ended.
    """

    def __init__(
        self,
        members: Sequence[BucketMember],
        num_buckets: int,
        strategy: BucketStrategy,
        *,
        automatic: bool = True,
    ) -> None:
        self._strategy, self._automatic, self._num_buckets = strategy, automatic, num_buckets
        self._num_members = [0] * num_buckets
        for member in members:
            self._num_members[member.bucket] += 1
        self.synchronizes = True
        self.used = bytearray(len(members))
        self.started_early: set[int] = set()
        self._active = False
        self._begin()
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(number, member))
            for number, member in enumerate(members)
        ]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def active(self) -> bool:
        """Whether a backward has begun that has not come to its end."""
        return self._active

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward only adds gradients up locally."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def forget_used(self) -> None:
        """No member counts as used any more."""
        self.used = bytearray(len(self.used))

    def reset(self) -> None:
        """Forget the backward that was begun, and which members were used."""
        self.forget_used()
        self._active = False
        self._begin()

    def prepare(self) -> None:
        """Forget a backward that was broken off; call it before each forward.

        Raises:
            RuntimeError: Some of its buckets had started, so the ranks no longer agree.
        """
        if self._active and any(self._started):
            raise RuntimeError(
                f"the last backward ended with an error after {sum(self._started)} of "
                f"{self._num_buckets} buckets had left, so "
                "the ranks no longer agree on what comes next; restart from a checkpoint"
            )
        self._active = False

    def start(self, bucket: int) -> None:
        """Start to reduce a bucket in this backward, unless it was started in it already."""
        if not self._started[bucket]:
            self._strategy.start(bucket)
            self._started[bucket] = 1

    def start_rest(self) -> None:
        """Start the buckets that still wait, in order: some of their members had no gradient."""
        for bucket in range(self._num_buckets):
            self.start(bucket)

    def reduce_now(self) -> None:
        """Reduce all buckets outside of a backward, with what is stored in them."""
        self._begin()
        self._strategy.finish()

    def activate(self, number: int | None = None) -> None:
        """Begin a backward, unless one has begun. Call it within backward only."""
        if self._active:
            return
        self._strategy.begin_backward(number)
        self._active = True
        self._begin()
        # The end of backward is known to the autograd engine alone: the gradients of parameters
        # that took no part never arrive. The engine calls back when its last task is done, and an
        # error in the callback comes out of backward().
        after_backward(self._end_backward)

    def _begin(self) -> None:
        """Nothing has arrived, nothing has started."""
        self._num_missing = list(self._num_members)
        self._arrived = bytearray(len(self.used))
        self._started = bytearray(self._num_buckets)
        self._next = 0

    def _hook(self, number: int, member: BucketMember) -> Callable[[nn.Parameter], None]:
        bucket, store = member.bucket, member.store

        def arrived(_: nn.Parameter) -> None:
            if not self._active:
                self.activate(number)
            if self._started[bucket] or bucket in self.started_early:
                raise RuntimeError(
                    f"a gradient of {member.name} arrived after its bucket {bucket} had left; "
                    "if the model uses torch.utils.checkpoint, pass use_reentrant=False"
                )
            store()
            self.used[number] = 1
            # A parameter that is used by several backwards within one, as create_graph and
            # reentrant checkpoints have them, arrives more than once and is counted once.
            if not self._arrived[number]:
                self._arrived[number] = 1
                self._num_missing[bucket] -= 1
                if self.synchronizes and self._automatic:
                    self._start_complete()

        return arrived

    def _start_complete(self) -> None:
        """Start every bucket that is complete and whose turn it is."""
        while self._next < self._num_buckets and not self._num_missing[self._next]:
            self.start(self._next)
            self._next += 1

    @torch.no_grad()
    def _end_backward(self) -> None:
        # The callback of a backward within a backward runs at the end of the inner one, while a
        # node of the outer one is being evaluated.
        if in_autograd_node():
            raise RuntimeError(
                "a backward that runs within another one ended before it, and would have "
                "reduced gradients that are not there "
                "yet; if the model uses torch.utils.checkpoint, pass use_reentrant=False"
            )
        if self.synchronizes:
            self._strategy.finish()
        self._active = False
