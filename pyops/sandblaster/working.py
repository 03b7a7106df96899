"""work: a process that computes portions for the coordinator, until it is told to stop.

A lost shard, or another coordinator, ends a term; a worker joins the next one.

task: evaluation, unit -> parameters from all shards, once an evaluation
                       -> gradient to all shards -> done: the loss
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.failure import CommunicationError
from pyops.parameter_server.messages import HEADER_BYTES, Kind, Reply, Request, message
from pyops.parameter_server.sessions.session import OPENING, Session, Tag
from pyops.parameter_server.vectors import cut
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.recovery import current_term
from pyops.sandblaster.remote import STOP, agree, notes, waited
from pyops.sandblaster.worker import Worker

__all__ = ["work"]

FOREVER = 1e9
POLL = 0.01  # seconds


def work(
    store: dist.Store,
    worker: Worker,
    *,
    shards: int,
    config: SandblasterConfig,
    lease: float = 10.0,
    patience: float = 60.0,
) -> int:
    """Compute portions until `stop(store)`. Workers may join at any time.

    Args:
        store: Where all meet.
        worker: The model and its loss. It has the parameters that the run arrived at when this
            returns.
        shards: How many there are.
        config: The run's options, the same in all processes.
        lease: As of `coordinate`: signs of life come eight times as often.
        patience: Seconds that are waited, where a shard is lost, until it is there again.

    Returns:
        How many units it has computed.

    Raises:
        ValueError: For another model or other options than those of the other processes.
        CommunicationError: A shard or the store is gone.
    """
    place = notes(store)
    agree(place, worker.model, shards, config)
    term = computed = 0
    lost: RuntimeError | None = None
    try:
        while _begun(place, term, seconds=FOREVER if lost is None else patience):
            term, lost = current_term(place), None
            joined = _Joined(term, int(place.add(f"{term}/workers", 1)) - 1)
            try:
                with (
                    _beats(notes(store), joined.key("beat"), lease / 8),
                    _links(place, worker, shards, look=joined.look(place)) as links,
                ):
                    if _compute(place, worker, joined, links, config):
                        return computed + joined.computed
            except _TermIsOver:
                continue
            except dist.DistError:
                raise
            except RuntimeError as error:  # a shard is lost; the next term may have it again
                lost = error
            computed += joined.computed
        if lost is None:
            return computed
        raise lost
    except RuntimeError as error:
        if isinstance(error, CommunicationError):
            raise
        raise CommunicationError(
            f"a worker's shard or the store is gone ({str(error).splitlines()[0]}), and was not "
            f"there again within {patience:g} s"
        ) from error


def _begun(store: dist.Store, term: int, *, seconds: float) -> bool:
    """Wait for a term after this one; False where none begins in time, or all are told to end."""
    deadline = time.monotonic() + seconds
    while current_term(store) <= term:
        if time.monotonic() > deadline or store.check([STOP]):
            return False
        time.sleep(POLL)
    return True


class _Joined:
    """A worker's part in a term."""

    def __init__(self, term: int, number: int) -> None:
        self.term, self.number, self.computed = term, number, 0

    def key(self, *what: object) -> str:
        """Of a note of this worker: "task", 3, say."""
        name, *rest = what
        return "/".join(str(each) for each in (self.term, name, self.number, *rest))

    def look(self, store: dist.Store) -> Callable[[], None]:
        """See whether the term is over: raises _TermIsOver."""

        def see() -> None:
            if current_term(store) != self.term:
                raise _TermIsOver

        return see


class _TermIsOver(Exception):
    """Whoever waits for a note of it waits in vain."""


def _compute(
    store: dist.Store, worker: Worker, joined: _Joined, links: _Links, config: SandblasterConfig
) -> bool:
    """Compute what the coordinator asks for; False where its term ends before the run does."""

    have = 0
    while True:
        key = joined.key("task", joined.computed + 1)
        try:
            if not waited(store, key, seconds=FOREVER, look=joined.look(store)):
                break
        except _TermIsOver:
            return False
        evaluation, unit = json.loads(store.get(key))
        store.delete_key(key)
        if evaluation != have:
            values, have = links.parameters(), evaluation
        loss, gradient = worker.compute(values, config.portions_of(unit))
        links.send(gradient, evaluation=evaluation, unit=unit)
        joined.computed += 1
        store.set(joined.key("done", joined.computed), float(loss).hex())
    worker.buffer.data.copy_(links.parameters())
    return True


class _Links:
    """A worker's sessions with all shards."""

    def __init__(self, sessions: list[Session], starts: list[int], like: Tensor) -> None:
        self._sessions, self._like = sessions, like
        self._parts = [slice(a, b) for a, b in pairwise(starts)]

    def parameters(self) -> Tensor:
        """Those of the trial point."""
        values = torch.empty_like(self._like)
        for session in self._sessions:
            session.send(Request(Kind.FETCH, 0, 0).write(message()), Tag.FETCH)
        for session, part in zip(self._sessions, self._parts, strict=True):
            answer = message(values[part].numel() * values.element_size())
            session.receive(answer, Tag.FETCH_REPLY)
            values[part] = answer[HEADER_BYTES:].view(values.dtype)
        return values

    def send(self, gradient: Tensor, *, evaluation: int, unit: int) -> None:
        """Give each shard its part of a unit's gradient; returns when all have it."""
        for session, part in zip(self._sessions, self._parts, strict=True):
            whole = message(gradient[part].numel() * gradient.element_size())
            whole[HEADER_BYTES:].view(gradient.dtype).copy_(gradient[part])
            request = Request(Kind.PUSH, 0, 0, epoch=evaluation, sequence=unit)
            session.send(request.write(whole), Tag.PUSH)
        for session in self._sessions:
            Reply.of(session.receive(message(), Tag.PUSH_REPLY))


@contextlib.contextmanager
def _links(
    store: dist.Store, worker: Worker, shards: int, *, look: Callable[[], None]
) -> Iterator[_Links]:
    sessions: list[Session] = []
    try:
        for shard in range(shards):
            while not (start := int(store.add(f"{shard}/served", 0))):
                if store.check([STOP]):
                    raise CommunicationError(f"the run has ended without its shard {shard}")
                time.sleep(POLL)
            join = int(store.add(f"{shard}/{start}/joins", 1))
            name = f"{shard}/{start}/join/{join}"
            # A shard that was lost meanwhile answers nothing, and a session waits for long.
            if not waited(store, f"{name}/here", seconds=OPENING, look=look):
                raise RuntimeError(f"shard {shard} does not answer a worker that joins")
            sessions.append(Session(store, name=name, end=1))
        yield _Links(sessions, cut(worker.model, shards=shards), worker.buffer.data)
    finally:
        for session in sessions:
            session.close()


@contextlib.contextmanager
def _beats(store: dist.Store, key: str, seconds: float) -> Iterator[None]:
    """Give signs of life meanwhile."""
    over = threading.Event()

    def beat() -> None:
        count = 0
        with contextlib.suppress(dist.DistError):
            while not over.wait(seconds):
                count += 1
                store.set(key, str(count))

    threading.Thread(target=beat, daemon=True).start()
    try:
        yield
    finally:
        over.set()
