"""serve: a process that holds one shard of the vectors, until it is told to stop.

main thread             does what the coordinator orders
two threads a worker    one receives gradients, one answers with parameters
"""

from __future__ import annotations

import json
import threading
import time

import torch.distributed as dist
from torch import Tensor, nn

from pyops.failure import CommunicationError
from pyops.parameter_server.config import check_number
from pyops.parameter_server.messages import HEADER_BYTES, Reply, Request, Verdict, message
from pyops.parameter_server.session import Session, Tag
from pyops.sandblaster.config import SandblasterConfig
from pyops.sandblaster.remote import STOP, agree, notes, waited
from pyops.sandblaster.shard import VectorShard
from pyops.sandblaster.worker import Worker

__all__ = ["serve"]

POLL = 0.01  # seconds
GRACE = 10.0  # seconds in which workers fetch the last parameters when the run is over
FOREVER = 1e9


def serve(
    store: dist.Store, model: nn.Module, *, shard: int, shards: int, config: SandblasterConfig
) -> Tensor:
    """Hold shard `shard` of `shards`, until `stop(store)`.

    Args:
        store: Where all meet.
        model: With the first parameters, the same in all processes.
        shard: Which one.
        shards: How many there are.
        config: The run's options, the same in all processes.

    Returns:
        This part of the parameters at the end.

    Raises:
        ValueError: For a number that does not fit, another model or other options than those of
            the other processes, or where another process holds this shard.
        CommunicationError: The store is gone.
    """
    check_number(shards, name="shards", least=1)
    check_number(shard, name="shard", least=0)
    if shard >= shards:
        raise ValueError(f"shard is {shard} of {shards}; give a number below {shards}")
    values = Worker(model, lambda *_: _nothing()).parts(shards)[shard]
    place = notes(store)
    agree(place, model, shards, config)
    if int(place.add(f"{shard}/served", 1)) > 1:
        raise ValueError(
            f"another process holds shard {shard} of this run; let one do it, or give each run a "
            "store of its own: torch.distributed.PrefixStore(name, store)"
        )
    held = VectorShard(values, history_size=config.history_size, leaves=config.portions)
    serving = _Serving(held, shard, config)
    threading.Thread(target=serving.greet, args=(notes(store),), daemon=True).start()
    try:
        serving.obey(place)
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        raise CommunicationError(f"shard {shard}: the store is gone ({reason})") from error
    finally:
        serving.end()
    return held.point


def _nothing() -> Tensor:
    raise AssertionError("a shard computes no loss")


class _Serving:
    """A shard, and who talks to it."""

    def __init__(self, held: VectorShard, shard: int, config: SandblasterConfig) -> None:
        self._held, self._shard, self._level = held, shard, config.level
        self._lock = threading.Lock()
        self._evaluation = 0
        self._units: set[int] = set()
        self._sessions: list[Session] = []
        self._talks: list[threading.Thread] = []
        self._over = False

    # the coordinator

    def obey(self, store: dist.Store) -> None:
        """Do what is ordered, one thing after the other."""
        turn = 1
        while waited(store, f"command/{turn}", seconds=FOREVER):
            operation, arguments = json.loads(store.get(f"command/{turn}"))
            try:
                with self._lock:
                    if operation == "begin_evaluation":
                        self._evaluation += 1
                        self._units.clear()
                    answer = {"found": getattr(self._held, operation)(*arguments)}
            except (ValueError, RuntimeError, KeyError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            store.set(f"answer/{turn}/{self._shard}", json.dumps(answer))
            turn += 1

    # workers

    def greet(self, store: dist.Store) -> None:
        """Open a session for every worker that announces itself."""
        opened = 0
        try:
            while not self._over and not store.check([STOP]):
                if int(store.add(f"{self._shard}/joins", 0)) > opened:
                    opened += 1
                    name = f"{self._shard}/join/{opened}"
                    talk = threading.Thread(target=self._talk, args=(store, name), daemon=True)
                    self._talks.append(talk)
                    talk.start()
                else:
                    time.sleep(POLL)
        except dist.DistError:  # the main thread says so
            return

    def _talk(self, store: dist.Store, name: str) -> None:
        try:
            session = Session(store, name=name, end=0)
            self._sessions.append(session)
            threading.Thread(target=self._gradients, args=(session,), daemon=True).start()
            self._parameters(session)
        except RuntimeError:  # the worker is gone: the coordinator finds out
            return

    def _gradients(self, session: Session) -> None:
        point = self._held.point
        whole = message(point.numel() * point.element_size())
        try:
            while True:
                request = Request.of(session.receive(whole, Tag.PUSH))
                gradient = whole[HEADER_BYTES:].clone().view(point.dtype)
                with self._lock:
                    verdict = self._add(request, gradient)
                session.send(Reply(verdict).write(message()), Tag.PUSH_REPLY)
        except RuntimeError:
            return

    def _add(self, request: Request, gradient: Tensor) -> Verdict:
        """Add a unit's gradient, once, to the sum that it belongs to."""
        if request.epoch != self._evaluation:
            return Verdict.TOO_STALE
        if request.sequence in self._units:
            return Verdict.REPEATED
        self._units.add(request.sequence)
        self._held.add_gradient(gradient, request.sequence, self._level)
        return Verdict.APPLIED

    def _parameters(self, session: Session) -> None:
        asked = message()
        while True:
            session.receive(asked, Tag.FETCH)
            with self._lock:
                trial, evaluation = self._held.trial, self._evaluation
                answer = message(trial.numel() * trial.element_size())
                answer[HEADER_BYTES:].view(trial.dtype).copy_(trial)
            Reply(Verdict.FETCHED, version=evaluation).write(answer)
            session.send(answer, Tag.FETCH_REPLY)

    def end(self) -> None:
        """Close all sessions, when the workers have left."""
        self._over = True
        deadline = time.monotonic() + GRACE
        for talk in self._talks:
            talk.join(max(0.0, deadline - time.monotonic()))
        for session in self._sessions:
            session.close()
