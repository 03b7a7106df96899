"""Line: the sessions of a replica with one shard, one after the other.

two threads      one pushes, one fetches, beside what the model computes
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.shared_memory import host
from pyops.failure import CommunicationError
from pyops.parameter_server.config import ConnectConfig
from pyops.parameter_server.messages import (
    HEADER_BYTES,
    Fetched,
    Kind,
    Reply,
    Request,
    Verdict,
    message,
)
from pyops.parameter_server.sessions.session import Session, Tag
from pyops.parameter_server.sessions.shared_memory import Memory, Room

__all__ = ["Line"]

POLL = 0.005  # seconds


class Line:
    """The sessions with one shard, one after the other.

    Args:
        store: Where the shard's starts are to be found.
        shard: Its number.
        hello: What the replica says of itself when it joins.
        config: How long it waits.
    """

    def __init__(
        self, store: dist.Store, shard: int, hello: dict[str, Any], config: ConnectConfig
    ) -> None:
        self._store, self._shard, self._hello = store, shard, hello
        self._patience, self._shares = config.patience, config.shared_memory
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._attempts = 0
        self.acknowledged = self.seen = 0
        self.values: Callable[[], Tensor] | None = None
        self.gradients: Sequence[Tensor] = ()  # this shard's part of both vectors
        self.closing = False
        self._pool = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]

    def submit(self, channel: int, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue an exchange: channel 0 pushes, 1 fetches."""
        return self._pool[channel].submit(call, *arguments)

    def _epoch_now(self, store: dist.Store | None = None) -> int:
        key, store = f"{self._shard}/epoch", store or self._store
        return int(store.get(key)) if store.check([key]) else 0

    @property
    def lends(self) -> bool:
        """Whether the shard reads the gradients where they lie."""
        return self._session is not None and self._session.lent

    def keep_gradients(self) -> None:
        """No shard reads gradients where they lie: later sessions do not offer them."""
        self._hello, self.gradients = self._hello | {"gradients": None}, ()

    def watch(self, store: dist.Store) -> None:
        """End the session with a shard that has been started again since, so that what waits in it
        goes on with the new one, whatever became of the old one's connections.

        Args:
            store: A connection of the thread that watches.
        """
        session = self._session
        if session is not None and self._epoch_now(store) != session.epoch:
            self.drop(session)

    def open(self) -> Session:
        """The session, opened where there is none. ValueError for what the shard refuses,
        CommunicationError where it does not come back."""
        with self._lock:
            if self._session is not None:
                return self._session
            end = time.monotonic() + self._patience
            while time.monotonic() < end and not self.closing:
                try:
                    self._session = self._open(end)
                except _AnotherTime:
                    time.sleep(POLL)
                except RuntimeError as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0]
                    raise CommunicationError(
                        f"worker {self._hello['worker']}: the store in which shards are found is "
                        f"gone ({reason}); let it be served by a process that outlives the others"
                    ) from error
                else:
                    return self._session
        raise CommunicationError(
            f"worker {self._hello['worker']}: shard {self._shard} did not answer within "
            f"{self._patience:g} seconds; start it again, or give more patience",
            ranks=[self._shard],
        )

    def _open(self, end: float) -> Session:
        epoch = self._epoch_now()
        if epoch == 0:
            raise _AnotherTime
        place = f"{self._shard}/{epoch}"
        room = self._room()
        self._attempts += 1  # so that no two are alike
        hello = self._hello | {"acknowledged": self.acknowledged, "seen": self.seen}
        hello |= {"host": host(), "room": None if room is None else room.address}

        def gone() -> bool:
            return time.monotonic() > end or self._epoch_now() != epoch or self.closing

        try:
            name = self._announce(place, json.dumps(hello | {"attempt": self._attempts}))
            while not self._store.check([f"{name}/answer"]):
                if gone():
                    raise _AnotherTime
                time.sleep(POLL)
            self._store.set(f"{name}/here", "1")
            answer = json.loads(self._store.get(f"{name}/answer"))
        finally:
            if room is not None:
                room.close()
        if "error" in answer:
            raise ValueError(answer["error"])
        try:
            session = Session.open(
                self._store,
                gone=gone,
                name=name,
                end=1,
                room=room if answer["room"] else None,
                parameters=_opened(answer["parameters"]),
                epoch=epoch,
                lent=answer["room"] and hello["gradients"] is not None,
            )
            if answer["values"]:
                assert self.values is not None
                values = self.values().view(-1)
                whole = message(values.numel() * values.element_size())
                whole[HEADER_BYTES:].view(values.dtype).copy_(values)
                request = Request(Kind.VALUES, self._hello["worker"], self._hello["incarnation"])
                session.send(request.write(whole), Tag.VALUES)
        except RuntimeError as error:
            raise _AnotherTime from error
        return session

    def _announce(self, place: str, hello: str) -> str:
        """Leave a note for the shard, behind those of others; its name. The number and the note are
        written at once: a number without a note, of a replica that died in between, would keep the
        shard waiting for it."""
        key = f"{place}/joins"  # how many notes there are, at least
        before = self._store.get(key).decode() if self._store.check([key]) else ""
        number = int(before or 0) + 1
        while self._store.compare_set(f"{place}/join/{number}", "", hello) != hello.encode():
            number += 1
        self._store.compare_set(key, before, str(number))
        return f"{place}/join/{number}"

    def _room(self) -> Room | None:
        """One to offer, where there is memory for it."""
        if not self._shares:
            return None
        try:
            lent = self._hello["gradients"] is not None
            return Room.make(0 if lent else self._hello["push_bytes"], self._hello["fetch_bytes"])
        except OSError:
            return None

    def drop(self, session: Session) -> None:
        """The session has failed."""
        with self._lock:
            if self._session is session:
                self._session = None
                session.close()

    def message(self, payload_bytes: int) -> Tensor:
        """Where a push is best written; a later session copies it into its own room."""
        session = self._session
        return (
            message(payload_bytes) if session is None else session.buffer(Tag.PUSH, payload_bytes)
        )

    def check(self, request: Request) -> None:
        """Send a check, where there is a session that it is of use to."""
        session = self._session
        if session is not None and session.lent:
            with contextlib.suppress(RuntimeError):  # the push finds out, too
                session.send(replace(request, epoch=session.epoch).write(message()), Tag.PUSH)

    def _message_of(self, request: Request, session: Session) -> Tensor:
        """The message of a push that lies in the gradients: its header, or a copy of all of it."""
        if session.lent:
            return message()
        payload = self.gradients[request.near - 1].view(torch.uint8)
        copied = message(len(payload))
        copied[HEADER_BYTES:] = payload
        return copied

    def push(self, request: Request, whole: Tensor | None) -> Tensor:
        """Send a push until it is answered; the reply."""
        answer = message()
        while True:
            session = self.open()
            sent = self._message_of(request, session) if whole is None else whole
            try:
                session.send_push(replace(request, epoch=session.epoch).write(sent))
                session.receive(answer, Tag.PUSH_REPLY)
            except RuntimeError:
                self.drop(session)
                continue
            reply = Reply.of(answer)
            if reply.verdict == Verdict.OLD_EPOCH:
                self.drop(session)
                continue
            self.acknowledged = max(self.acknowledged, request.sequence)
            self.seen = max(self.seen, reply.version)
            return answer

    def fetch(self, request: Request, sizes: Callable[[bool], int]) -> Fetched:
        """Ask for parameters until they come."""
        while True:
            session = self.open()
            whole = bool(request.whole) or session.fresh
            answer = session.buffer(Tag.FETCH_REPLY, sizes(whole))
            near = int(session.near)
            asked = replace(request, epoch=session.epoch, whole=int(whole), near=near)
            try:
                session.send(asked.write(message()), Tag.FETCH)
                session.receive(answer, Tag.FETCH_REPLY)
            except RuntimeError:
                self.drop(session)
                continue
            reply = Reply.of(answer)
            if reply.verdict == Verdict.OLD_EPOCH:
                self.drop(session)
                continue
            session.fresh = False
            self.seen = max(self.seen, reply.version)
            return session.fetched(answer, number=request.sequence, whole=whole)

    def leave(self, request: Request, whole: Tensor) -> None:
        """Say goodbye, where there is somebody to hear it, and end."""
        self.closing, session = True, self._session
        if session is not None:
            with contextlib.suppress(RuntimeError):
                session.send(request.write(whole)[:HEADER_BYTES], Tag.PUSH)
                session.receive(message(), Tag.PUSH_REPLY, seconds=5.0)
            session.close()
        for pool in self._pool:
            pool.shutdown(wait=True)

    def abandon(self) -> None:
        """End without a word."""
        self.closing, session = True, self._session
        if session is not None:
            session.close()
        for pool in self._pool:
            pool.shutdown(wait=False, cancel_futures=True)


def _opened(address: list[int] | None) -> Tensor | None:
    """The shard's parameters, where it offers them and they can be opened."""
    if address is None:
        return None
    try:
        return Memory.open(address).bytes
    except OSError:  # a sandbox that hides processes from each other, say
        return None


class _AnotherTime(Exception):
    """The shard is not there, or not any more."""
