"""Client: a replica of Downpour SGD.

    for samples in ...:
        loss(model(samples)).backward()
        client.step()            # accrue, own step, push, fetch: what is due

Dean et al., Large scale distributed deep networks, NeurIPS 2012, section 4.1 and appendix 7.1.
Parameters that have arrived are copied in between two steps, never while the model computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from pyops.failure import CommunicationError
from pyops.flat import FlatBuffer
from pyops.parameter_server.config import DownpourConfig
from pyops.parameter_server.messages import (
    HEADER_BYTES,
    Fetched,
    Kind,
    Links,
    Pending,
    Reply,
    Request,
    Verdict,
)
from pyops.parameter_server.vectors import Part, all_finite, check_model, named_parameters

__all__ = ["Client"]


class Client:
    """A replica: its model, its clock, and what it has to say to the shards.

    Args:
        model: Its parameters become views of one flat vector, and get the shards' values. Where
            shards read gradients in place, each `.grad` is another view after a push.
        links: The ways to the shards, such as `connect` makes.
        config: When it exchanges and how.
        worker: Its number; the lowest one that lives makes the warm start.
        incarnation: Which start of this worker it is: 1, 2, ...

    Attributes:
        step_number: Steps so far.
        versions: Of each shard, the version of the parameters that the model computes with.
        staleness: How many pushes were applied with which staleness, of all shards.
        refused: Pushes that shards refused, by Verdict.
        pushes: How the part of each shard is written, with what a codec has left out.
        skipped: Steps whose gradient held a number that is not finite; it is in no push.

    Raises:
        ValueError: For a model that shards can't hold.
    """

    def __init__(
        self,
        model: nn.Module,
        links: Links,
        *,
        config: DownpourConfig | None = None,
        worker: int = 0,
        incarnation: int = 1,
    ) -> None:
        self.config = config or DownpourConfig()
        codecs = (self.config.push_codec, self.config.fetch_codec)
        check_model(model, buffers=self.config.buffers, codecs=any(codecs))
        self.model, self.links = model, links
        self.worker, self.incarnation = worker, incarnation
        # Where shards read gradients in place: vectors of which one is computed in, `_near`.
        self._lent, self._near = links.gradients, 1
        grad = self._lent[0] if self._lent else None
        self.buffer = FlatBuffer(named_parameters(model), grad=grad)
        data = self.buffer.data
        starts = links.starts
        self._parts = [slice(a, b) for a, b in pairwise(starts)]
        sizes = [part.stop - part.start for part in self._parts]
        dtype = data.dtype
        self.pushes = [Part(n, dtype=dtype, codec=codecs[0], feedback=True) for n in sizes]
        self._fetches = [Part(n, dtype=dtype, codec=codecs[1]) for n in sizes]
        # What shards have sent: the model itself, where nothing but a fetch changes it.
        apart = codecs[1] is not None or self.config.local_lr > 0
        self._known = data.clone() if apart else data
        self._accrued = torch.empty_like(data)  # of _count gradients, where that is above 0
        self._first: Tensor | None = None
        self._count = self._checked = self.step_number = 0
        self._sequences = [0] * len(sizes)
        self._num_fetches = 0
        self.versions = [0] * len(sizes)
        self._pushing: list[Pending] = []
        self._fetching: list[Pending] = []
        self._due: int | None = None
        self.staleness: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()
        self.skipped = self.pushed_gradients = 0

    # what a step is made of; each yields what has to be waited for

    def first_fetch(self) -> Iterator[Pending]:
        """Get the shards' parameters for the first step. Yields what has to be waited for."""
        self._begin_fetch()
        yield from self._arrive()

    def exchange(self) -> Iterator[Pending]:
        """What `step` does, as an iterator over what has to be waited for: virtual time waits in
        its own way."""
        due = self.step_number % self.config.push_every == 0
        gradient = self._gradient(check=due and self._count == 0)
        if gradient is not None:
            if self.config.local_lr:
                self.buffer.data.add_(gradient, alpha=-self.config.local_lr)
            self._accrue(gradient, due=due)
        if due:
            yield from self._pushed()
            self._begin_push()
        elif self._first is not None:
            self._accrued.copy_(self._first)
            self._first = None
        self.buffer.zero_grad()
        self.step_number += 1
        if self._due == self.step_number:
            yield from self._arrive()
        if self.step_number % self.config.fetch_every == 0:
            at_once = self.config.fetch_delay == 0
            self._begin_fetch(behind_pushes=at_once)
            self._due = self.step_number + self.config.fetch_delay
            if at_once:
                yield from self._pushed()
                yield from self._arrive()

    def step(self) -> None:
        """After backward: accrue the gradient, make the replica's own step, and push and fetch what
        is due. Gradients are zero afterwards.

        Raises:
            CommunicationError: A shard is lost for good, or a newer incarnation of this worker has
                joined.
        """
        for pending in self.exchange():
            pending.result()

    def flush(self) -> Iterator[Pending]:
        """Push what is accrued; an iterator as `exchange`."""
        yield from self._pushed()
        if self._count:
            self._begin_push()
            yield from self._pushed()

    def settle(self) -> None:
        """Have all arrive that is on its way, and push what is accrued: afterwards this replica
        has nothing that the shards do not know."""
        for pending in self._arrive():
            pending.result()
        for pending in self.flush():
            pending.result()

    def start(self) -> Client:
        """Wait for the shards' parameters, as the first step needs them; returns the client."""
        for pending in self.first_fetch():
            pending.result()
        return self

    def close(self) -> None:
        """Push what is accrued, and leave."""
        for pending in self.flush():
            pending.result()
        for pending in self._fetching:
            pending.result()
        self.links.close()

    def values_of(self, shard: int) -> Tensor:
        """A copy of the parameters of a shard that arrived last: what a shard begins with that has
        none."""
        return self._known[self._parts[shard]].clone()

    # parts

    def _gradient(self, *, check: bool) -> Tensor | None:
        """The flat gradient; None, counted, where it is not finite. With `check` shards that can
        read it look, too, at the same time: it may be all of a push."""
        for index in range(len(self.buffer)):
            self.buffer.restore_gradient(index)
        self._checked = self.step_number + 1 if check and self._lent else 0
        if self._checked:
            for shard in range(len(self._parts)):
                self.links.check(shard, self._request(Kind.CHECK, shard, 0, near=self._near))
        if all_finite(self.buffer.grad):
            return self.buffer.grad
        self.skipped += 1
        self._checked = 0
        return None

    def _accrue(self, gradient: Tensor, *, due: bool) -> None:
        """Add a gradient. The first of a push stays where it is: it may be the only one. The sum
        of those that are due is made in the last one, which shards may read where it lies."""
        if self._count == 0:
            self._first = gradient
        elif due:
            self._first = gradient.add_(self._accrued)
        else:
            self._accrued += gradient
        self._count += 1

    def _request(
        self, kind: Kind, shard: int, sequence: int, *, whole: bool = False, near: int = 0
    ) -> Request:
        return Request(
            kind,
            self.worker,
            self.incarnation,
            sequence=sequence,
            seen=self.versions[shard],
            count=self._count,
            whole=int(whole),
            near=near,
            checked=0 if kind == Kind.FETCH else self._checked,
        )

    def _begin_push(self) -> None:
        if not self._count:
            return
        accrued = self._accrued if self._first is None else self._first
        self._first = None
        if self.config.mean and self._count > 1:
            accrued /= self._count
        near = self._place(accrued) if self._lent else 0
        for shard, where in enumerate(self._parts):
            whole = None
            if not near:
                part = self.pushes[shard]
                whole = self.links.message(shard, part.payload_bytes)
                part.write(accrued[where], whole[HEADER_BYTES:])
            self._sequences[shard] += 1
            request = self._request(Kind.PUSH, shard, self._sequences[shard], near=near)
            self._pushing.append(self.links.push(shard, request, whole))
        if near == self._near:
            self._near = 3 - near
            self.buffer.move_gradient(self._lent[self._near - 1])
        self.pushed_gradients += self._count
        self._count = self._checked = 0

    def _place(self, accrued: Tensor) -> int:
        """Which of the lent vectors holds a push, 1 or 2. The one that is not computed in is free:
        the push before has been answered."""
        if accrued is self.buffer.grad:
            return self._near
        free = 3 - self._near
        self._lent[free - 1].copy_(accrued)
        return free

    def _pushed(self) -> Iterator[Pending]:
        pushing, self._pushing = self._pushing, []
        yield from pushing
        for shard, pending in enumerate(pushing):
            reply = Reply.of(pending.result())
            self._check(reply, shard)
            if reply.verdict == Verdict.APPLIED:
                self.staleness[reply.staleness] += 1
            elif reply.verdict != Verdict.REPEATED:
                self.refused[Verdict(reply.verdict).name] += 1

    def _check(self, reply: Reply, shard: int) -> None:
        if reply.verdict == Verdict.OLD_INCARNATION:
            raise CommunicationError(
                f"worker {self.worker}: shard {shard} refused incarnation {self.incarnation}, as a "
                "newer one has joined; let this process end, or give each worker its own number"
            )

    def _begin_fetch(self, *, behind_pushes: bool = False) -> None:
        """Ask for parameters; `behind_pushes`: for those that the last pushes have changed, whose
        answers need not be waited for before."""
        self._num_fetches += 1
        for shard, part in enumerate(self._fetches):
            whole = self.config.fetch_codec is None or self._num_fetches == 1
            request = self._request(Kind.FETCH, shard, self._num_fetches, whole=whole)
            if behind_pushes:
                request = replace(request, after=self._sequences[shard])

            def sizes(entire: bool, part: Part = part) -> int:
                return part.whole_bytes if entire else part.payload_bytes

            self._fetching.append(self.links.fetch(shard, request, sizes))

    def _arrive(self) -> Iterator[Pending]:
        fetching, self._fetching = self._fetching, []
        yield from fetching
        arrived: list[Fetched] = []
        for shard, pending in enumerate(fetching):
            arrived.append(pending.result())
            self._check(arrived[-1].reply, shard)
        for shard, fetched in enumerate(arrived):
            known = self._known[self._parts[shard]]
            read = known if fetched.whole else torch.empty_like(known)
            for payload in fetched.payloads():
                self._fetches[shard].read(payload, read, whole=fetched.whole)
            if not fetched.whole:
                known += read
            self.versions[shard] = fetched.reply.version
        if self._known is not self.buffer.data:
            self.buffer.data.copy_(self._known)
        self._due = None
