"""serve: a process that holds one shard, until it is told to stop.

main thread             looks for replicas that join, and for those without a sign of life
two threads a session   one receives pushes and applies them, one answers fetches
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pyops.comm.collectives.shared_memory import host
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.eight_bit import FP8, Int8
from pyops.comm.compression.floats import BF16, Identity
from pyops.comm.compression.one_bit import OneBit
from pyops.failure import CommunicationError
from pyops.parameter_server.config import ShardConfig, check_number
from pyops.parameter_server.endpoint import Endpoint
from pyops.parameter_server.messages import HEADER_BYTES, Kind, Reply, Request, Verdict, message
from pyops.parameter_server.sessions.session import (
    OPENING,
    Session,
    Tag,
    own_connection,
    rendezvous,
)
from pyops.parameter_server.sessions.shared_memory import LOADS_IN_ORDER, Gradients, Memory, Room
from pyops.parameter_server.sessions.turns import Turns
from pyops.parameter_server.shard import Counts, MakeOptimizer, ParameterShard, check_optimizer
from pyops.parameter_server.snapshots import load_snapshot, save_snapshot

__all__ = ["HostedShard", "ServerConfig", "ShardReport", "serve", "stop"]

POLL = 0.01  # seconds
STOP = "stop"
CODECS = (Identity(), BF16(), Int8(), FP8(), FP8(format="e5m2"), OneBit(), OneBit(block=None))


@dataclass(frozen=True)
class ServerConfig:
    """Where a shard's process keeps snapshots, and when it gives a replica up."""

    snapshots: Path | str | None = None
    """The folder of snapshots, from which a shard that is started again goes on. None: it begins
    with the parameters of a replica."""
    lease: float = 30.0
    """Seconds without a sign of life after which a replica is lost. A process that dies is lost at
    once."""
    codecs: Sequence[Codec] = ()
    """Codecs with other options than their defaults that replicas use."""

    def __post_init__(self) -> None:
        if isinstance(self.lease, bool) or not self.lease > 0:
            raise ValueError(f"lease is {self.lease!r}; give seconds, above 0")


@dataclass(frozen=True)
class ShardReport:
    """How a shard ended.

    Attributes:
        epoch: Which start of the shard it was.
        version: Of its parameters.
        counts: What became of pushes.
        staleness: How many pushes were applied with which staleness.
        log: As of ParameterShard.
    """

    epoch: int
    version: int
    counts: Counts
    staleness: dict[int, int]
    log: list[tuple[str, int, int]]


def stop(store: dist.Store) -> None:
    """Tell every shard that meets its replicas in `store` to end."""
    rendezvous(store).set(STOP, "1")


def serve(
    store: dist.Store,
    optimizer: MakeOptimizer,
    *,
    shard: int = 0,
    shards: int = 1,
    config: ShardConfig | None = None,
    server: ServerConfig | None = None,
) -> ShardReport:
    """Hold shard `shard` of `shards`, until `stop(store)`.

    Args:
        store: Where replicas look for it, such as a TCPStore that another process serves.
        optimizer: Makes the optimizer of a flat parameter, as of ParameterShard.
        shard: Which one.
        shards: How many there are.
        config: When it answers, what it applies, and what it keeps.
        server: Where snapshots go, and when a replica is lost.

    Returns:
        How it ended.

    Raises:
        ValueError: Before anything is started, for options that do not fit, or a damaged snapshot.
        CommunicationError: The store is gone, or another process serves this shard now.
    """
    check_number(shards, name="shards", least=1)
    check_number(shard, name="shard", least=0)
    if shard >= shards:
        raise ValueError(f"shard is {shard} of {shards}; give a number below {shards}")
    check_optimizer(optimizer(nn.Parameter(torch.zeros(1, device="cpu"))))
    server = server or ServerConfig()
    state = load_snapshot(server.snapshots, shard) if server.snapshots is not None else None
    serving = _Serving(rendezvous(store), optimizer, (shard, shards), config, server)
    with contextlib.ExitStack() as stack:
        stack.callback(serving.end)
        try:
            serving.begin(state)
            serving.run()
        except RuntimeError as error:
            if isinstance(error, CommunicationError):
                raise
            reason = str(error).splitlines()[0]
            raise CommunicationError(f"shard {shard}: the store is gone ({reason})") from error
    return serving.report()


class HostedShard:
    """A shard that a thread of this process serves, beside what else the process does; the same
    process may hold a replica.

    Args:
        store: As of `serve`, like all that follow.
        optimizer: Makes the optimizer of a flat parameter.
        shard: Which one.
        shards: How many there are.
        config: When it answers, what it applies, and what it keeps.
        server: When a replica is lost. Its `snapshots` are not read.
    """

    def __init__(
        self,
        store: dist.Store,
        optimizer: MakeOptimizer,
        *,
        shard: int = 0,
        shards: int = 1,
        config: ShardConfig | None = None,
        server: ServerConfig | None = None,
    ) -> None:
        check_optimizer(optimizer(nn.Parameter(torch.zeros(1, device="cpu"))))
        self._serving = _Serving(
            rendezvous(store), optimizer, (shard, shards), config, server or ServerConfig()
        )
        self._serving.begin(None)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=f"shard {shard}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._serving.run()
        except Exception as error:  # of the optimizer, of the store: `shard` raises it
            self._error = error
        finally:
            self._serving.end()

    @property
    def shard(self) -> ParameterShard:
        """What is held. It changes in other threads, but while no push is on its way.

        Raises:
            CommunicationError: The shard is not served any more, or no replica has joined yet.
        """
        if self._error is not None:
            raise CommunicationError(f"the shard of this process ended: {self._error}")
        if self._serving.held is None:
            raise CommunicationError("no replica has joined the shard of this process; connect one")
        return self._serving.held

    def join(self) -> None:
        """Wait for the end, which `stop` tells all shards of a store."""
        self._thread.join()


@dataclass
class _Replica:
    """A session and what it is watched by."""

    worker: int
    incarnation: int
    session: Session | None = None
    beat: bytes = b""
    since: float = 0.0
    over: bool = False


class _Serving:
    def __init__(
        self,
        store: dist.Store,
        optimizer: MakeOptimizer,
        place: tuple[int, int],
        config: ShardConfig | None,
        server: ServerConfig,
    ) -> None:
        self._store, self._optimizer, self._config = store, optimizer, config
        (self._shard, self._shards), self._server = place, server
        self._changed = threading.Condition()
        self._turns = Turns()  # of pushes that come over a link
        self._held: ParameterShard | None = None
        self._memory: Memory | None = None  # in which its parameters lie
        self._digest: str | None = None
        self._replicas: list[_Replica] = []
        self._talks: list[tuple[_Replica, threading.Thread]] = []
        self._joined = 0
        self._ending = False
        self._failed: Exception | None = None
        self._known_codecs: dict[str, Codec] = {c.name: c for c in (*CODECS, *server.codecs)}

    # life

    @property
    def held(self) -> ParameterShard | None:
        """The shard, once a replica has said how large it is."""
        return self._held

    def begin(self, state: dict[str, Any] | None) -> None:
        """Take a number, and the snapshot, and say that the shard is there."""
        self._epoch = int(self._store.add(f"{self._shard}/epochs", 1))
        if state is not None:
            self._digest = state["digest"]
            values = state["parameters"]
            self._held = self._hold(len(values), values.dtype)
            self._held.load_state_dict(state, restarted=True)
            self._held.epoch = self._epoch
        self._store.set(f"{self._shard}/epoch", str(self._epoch))

    def run(self) -> None:
        """Look for replicas until it is time to stop."""
        looked = 0.0
        while not self._store.check([STOP]):
            if self._failed is not None:
                raise self._failed
            if self._replaced():
                raise CommunicationError(
                    f"shard {self._shard}: another process serves it since; let one process hold "
                    "each shard"
                )
            self._greet()
            if time.monotonic() - looked > self._server.lease / 8:
                looked = time.monotonic()
                self._look_for_life()
            time.sleep(POLL)

    def end(self) -> None:
        """End all sessions."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for replica, thread in self._talks:
            if replica.session is not None and thread.is_alive():
                replica.session.close()
        # A thread that comes back from C++ when the interpreter has ended aborts the process.
        for _, thread in self._talks:
            thread.join(2 * OPENING)
        with self._changed:
            self._save()
        if self._memory is not None:
            self._memory.close()

    def _hold(self, numel: int, dtype: torch.dtype) -> ParameterShard:
        """A new shard, in memory that replicas of this host can read."""
        values = None
        with contextlib.suppress(OSError):
            self._memory = Memory.make("pyops-shard", numel * dtype.itemsize)
            values = self._memory.bytes.view(dtype)
        return ParameterShard(
            numel, self._optimizer, config=self._config, dtype=dtype, memory=values
        )

    def report(self) -> ShardReport:
        """How it ended."""
        held = self._held
        if held is None:
            return ShardReport(self._epoch, 0, Counts(), {}, [])
        return ShardReport(
            self._epoch, held.version, held.counts, dict(held.staleness), list(held.log)
        )

    def _replaced(self) -> bool:
        """Whether another process serves this shard since: its snapshots stay as they are."""
        try:
            return int(self._store.add(f"{self._shard}/epochs", 0)) != self._epoch
        except RuntimeError:  # the store is gone, and with it all who could have begun since
            return False

    def _save(self) -> None:
        if self._held is None or not self._held.initialized or self._server.snapshots is None:
            return
        if not self._replaced():
            state = self._held.state_dict() | {"digest": self._digest}
            save_snapshot(self._server.snapshots, self._shard, state)

    # joining

    def _greet(self) -> None:
        """Answer the replicas that have announced themselves."""
        place = f"{self._shard}/{self._epoch}"
        while self._store.check([name := f"{place}/join/{self._joined + 1}"]):
            self._joined += 1
            hello = json.loads(self._store.get(name))
            try:
                answer = self._admit(hello, name)
            except ValueError as error:
                answer = {"error": str(error)}
            self._store.set(f"{name}/answer", json.dumps(answer))

    def _codec(self, name: str | None) -> Codec | None:
        if name is None:
            return None
        if name not in self._known_codecs:
            raise ValueError(
                f"shard {self._shard} knows no codec {name!r}; give it to the shard, too: "
                "ServerConfig(codecs=[...])"
            )
        return self._known_codecs[name]

    def _admit(self, hello: dict[str, Any], name: str) -> dict[str, Any]:
        if hello["shards"] != self._shards or hello["digest"] != (self._digest or hello["digest"]):
            raise ValueError(
                f"worker {hello['worker']} and shard {self._shard} differ in the model's "
                f"parameters (name, shape, dtype) or in the number of shards ({hello['shards']} "
                f"and {self._shards}); start all with the same model and shards"
            )
        codecs = [self._codec(hello[key]) for key in ("push_codec", "fetch_codec")]
        dtype = {"float32": torch.float32, "float64": torch.float64}[hello["dtype"]]
        with self._changed:
            if self._held is None:
                self._held = self._hold(hello["numel"], dtype)
                self._held.epoch, self._digest = self._epoch, hello["digest"]
            held = self._held
            member = held.join(hello["worker"], hello["incarnation"])
            if member.incarnation == hello["incarnation"]:
                # What was answered, and is not in the snapshot that this shard began with.
                lost = max(0, hello["acknowledged"] - member.known)
                held.counts.lost_pushes += lost
                member.known = max(member.known, hello["acknowledged"])
            held.version = max(held.version, hello["seen"])
            wants = not held.initialized
            replica = _Replica(hello["worker"], hello["incarnation"], since=time.monotonic())
            self._replicas.append(replica)
            self._changed.notify_all()
        end = Endpoint(held, push_codec=codecs[0], fetch_codec=codecs[1])
        end.loan = room = _room_of(hello, end)
        talk = (replica, end, name, wants, room)
        thread = threading.Thread(target=self._talk, args=talk, daemon=True)
        self._talks = [(r, t) for r, t in self._talks if t.is_alive()] + [(replica, thread)]
        thread.start()
        offers = room is not None and self._memory is not None and LOADS_IN_ORDER
        address = self._memory.address if self._memory is not None and offers else None
        return {"values": wants, "room": room is not None, "parameters": address}

    # sessions

    def _talk(
        self, replica: _Replica, end: Endpoint, name: str, wants: bool, room: Room | None
    ) -> None:
        """A session's life: values where they are wanted, then fetches here and pushes beside."""
        try:
            self._await_other_end(name)
            replica.session = Session(self._store, name=name, end=0, room=room)
            if self._ending:  # which has closed the sessions that there were
                replica.session.close()
            if wants:
                whole = message(end.pushes.whole_bytes)
                replica.session.receive(whole, Tag.VALUES)
                with self._changed:
                    values = whole[HEADER_BYTES:].view(end.shard.parameter.dtype)
                    if end.shard.initialize(values):
                        self._save()
                    self._changed.notify_all()
            pushes = threading.Thread(target=self._run, args=(self._pushes, replica, end))
            pushes.start()
            self._run(self._fetches, replica, end)
            pushes.join()
        except RuntimeError:
            self._lost(replica)

    def _await_other_end(self, name: str) -> None:
        """Wait until the replica begins its end of a session, as one that has died never does: in
        Gloo nobody could end that wait. RuntimeError where it does not."""
        store, limit = own_connection(self._store), time.monotonic() + OPENING
        while not store.check([f"{name}/here"]):
            if self._ending or time.monotonic() > limit:
                raise RuntimeError("the replica has not come")
            time.sleep(POLL)

    def _run(self, talk: Any, replica: _Replica, end: Endpoint) -> None:
        assert replica.session is not None
        try:
            talk(replica, replica.session, end)
        except RuntimeError:
            self._lost(replica)
        except Exception as error:  # of the optimizer or of the disk: the main thread raises it
            self._failed = error
            self._lost(replica)

    def _lost(self, replica: _Replica) -> None:
        with self._changed:
            # A replica that has connected again is there, whenever its old session's end is heard.
            again = any(
                (other.worker, other.incarnation) == (replica.worker, replica.incarnation)
                for other in self._replicas
                if other is not replica and not other.over
            )
            if self._held is not None and not self._ending and not replica.over and not again:
                self._held.leave(replica.worker, replica.incarnation, lost=True)
            replica.over = True
            self._changed.notify_all()

    def _await_turn(self, replica: _Replica, request: Request, shard: ParameterShard) -> None:
        """Wait, with the lock held, until it is the request's turn. RuntimeError where that can't
        come."""
        while not shard.ready(request):
            if replica.over or self._ending:
                raise RuntimeError("the session is over")
            self._changed.wait(0.5)

    def _pushes(self, replica: _Replica, session: Session, end: Endpoint) -> None:
        whole = session.buffer(Tag.PUSH, end.push_bytes)
        while True:
            request = Request.of(session.receive(whole[:HEADER_BYTES], Tag.PUSH))
            if request.kind == Kind.LEAVE:
                with self._changed:
                    replica.over = True
                    end.shard.leave(request.worker, request.incarnation)
                    self._save()  # so that nobody has to be asked what was lost of its pushes
                    self._changed.notify_all()
                session.send(Reply(Verdict.APPLIED).write(message()), Tag.PUSH_REPLY)
                return
            session.receive_payload(whole, self._turns)
            end.read_push(request, whole)
            if request.kind == Kind.CHECK:
                continue
            with self._changed:
                self._await_turn(replica, request, end.shard)
                before = end.shard.counts.applied
                answer = end.push(request)
                applied = end.shard.counts.applied
                if applied != before and applied % end.shard.config.snapshot_every == 0:
                    self._save()
                self._changed.notify_all()
            session.send(answer, Tag.PUSH_REPLY)

    def _fetches(self, replica: _Replica, session: Session, end: Endpoint) -> None:
        asked, room = message(), partial(session.buffer, Tag.FETCH_REPLY)
        while True:
            request = Request.of(session.receive(asked, Tag.FETCH))
            with self._changed:
                self._await_turn(replica, request, end.shard)
                answer = end.fetch(request, room)
                self._changed.notify_all()
            session.send(answer, Tag.FETCH_REPLY)

    def _look_for_life(self) -> None:
        """Give up the replicas whose beats have not come for `lease` seconds."""
        now = time.monotonic()
        self._replicas = [replica for replica in self._replicas if not replica.over]
        for replica in self._replicas:
            key = f"beat/{replica.worker}/{replica.incarnation}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != replica.beat:
                replica.beat, replica.since = beat, now
            elif now - replica.since > self._server.lease and replica.session is not None:
                self._lost(replica)
                replica.session.close()


def _room_of(hello: dict[str, Any], end: Endpoint) -> Room | None:
    """The room that a replica offers, where it is on this host, and its gradients."""
    if hello["host"] != host() or hello["room"] is None:
        return None
    try:
        if hello["gradients"] is not None:
            lent = Gradients.open(hello["gradients"], hello["model_numel"], end.pushes.dtype)
            end.gradients = lent.part(hello["start"], hello["numel"])
        return Room.open(hello["room"], end.push_bytes, end.fetches.whole_bytes)
    except OSError:  # a sandbox that hides processes from each other, say
        end.gradients = ()
        return None
