"""Session: two processes and a Gloo group of their own, whose end leaves all others as they are.

    replica 0 --- session --- shard 0        a process that dies closes its own connections;
    replica 1 --- session --- shard 0        the other sessions go on

Ends on one host have memory of both, through which payloads go: see shared_memory.py.

Sessions find each other in a torch.distributed store, which a process that outlives them serves.
Neither the store nor Gloo asks who connects: let both listen on private addresses only.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable
from concurrent import futures
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.parameter_server.messages import HEADER_BYTES, Fetched, Reply, message
from pyops.parameter_server.sessions.shared_memory import LentParameters, Room
from pyops.parameter_server.sessions.turns import Turns
from pyops.torch_private import another_connection

__all__ = ["OPENING", "Session", "Tag", "own_connection", "rendezvous"]

OPENING = 20.0  # seconds that one end waits for the other
LOOK_EVERY = 0.05  # seconds, meanwhile
FOREVER = 365 * 86400.0


class Tag(IntEnum):
    """The channels of a session: pushes and fetches do not wait for each other."""

    VALUES = 1
    PUSH = 2
    PUSH_REPLY = 3
    FETCH = 4
    FETCH_REPLY = 5
    NOTHING = 6
    PAYLOAD = 7


def own_connection(store: dist.Store) -> dist.Store:
    """Another connection to the same store, so that a thread that waits keeps no other thread
    waiting."""
    found = another_connection(store)
    found.set_timeout(datetime.timedelta(seconds=OPENING))
    return found


def rendezvous(store: dist.Store) -> dist.Store:
    """Where shards and replicas leave notes for each other."""
    return dist.PrefixStore("pyops/parameter_server", own_connection(store))


class Session:
    """One end of a session. RuntimeError of any call: the other end is gone.

    Args:
        store: Where both ends meet.
        name: Of the session, another one each time.
        end: 0 for the shard, 1 for the replica.
        room: Memory of both ends; None: messages travel whole.
        parameters: The shard's, as bytes, where the replica can read them; needs a room.
        epoch: Which start of the shard is one of the ends.
        lent: Whether the shard reads the replica's gradients where they lie.

    Attributes:
        epoch: As given, like lent.
        fresh: Whether the replica has fetched nothing yet in this session.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        name: str,
        end: int,
        room: Room | None = None,
        parameters: Tensor | None = None,
        epoch: int = 0,
        lent: bool = False,
    ) -> None:
        self._other = 1 - end
        self.epoch, self.fresh, self.lent = epoch, True, lent
        self._room, self._parameters = room, parameters
        self._rooms = {} if room is None else {Tag.PUSH: room.pushes, Tag.FETCH_REPLY: room.fetches}
        timeout = datetime.timedelta(seconds=OPENING)
        place = dist.PrefixStore(name, own_connection(store))
        self._group: Any = dist.ProcessGroupGloo(place, end, 2, timeout)

    @classmethod
    def open(cls, store: dist.Store, *, gone: Callable[[], bool], **options: Any) -> Session:
        """A session that is not waited for once the other end has ended: Gloo learns of its death
        only when it has been connected.

        Args:
            store: As of the class, like `options`.
            gone: Whether the other end has ended; asked again and again. RuntimeError if so.
        """
        opened: futures.Future[Session] = futures.Future()

        def make() -> None:
            try:
                opened.set_result(cls(store, **options))
            except RuntimeError as error:
                opened.set_exception(error)

        # The end of the interpreter waits for it: a thread that comes back from C++ later would
        # abort the process.
        threading.Thread(target=make).start()
        while not futures.wait([opened], LOOK_EVERY).done:
            if gone():
                raise RuntimeError("the other end has ended before the session began")
        return opened.result()

    def buffer(self, tag: Tag, payload_bytes: int) -> Tensor:
        """Where a message of this channel is best written, or received: in the room, where there is
        one. It is overwritten by the channel's next message."""
        if tag in self._rooms:
            return self._rooms[tag][: HEADER_BYTES + payload_bytes]
        return message(payload_bytes)

    @property
    def near(self) -> bool:
        """Whether this replica reads the shard's parameters where they lie."""
        return self._room is not None and self._parameters is not None

    def fetched(self, answer: Tensor, *, number: int, whole: bool) -> Fetched:
        """What the answer to fetch `number` has brought."""
        if not Reply.of(answer).near:
            return Fetched(answer, whole=whole)
        assert self._room is not None
        assert self._parameters is not None
        return LentParameters(answer, number=number, room=self._room, parameters=self._parameters)

    def send(self, whole: Tensor, tag: Tag) -> None:
        """Send a message, and wait until it is on its way."""
        if tag in self._rooms:
            room = self._rooms[tag]
            if room.data_ptr() != whole.data_ptr():
                room[HEADER_BYTES : len(whole)] = whole[HEADER_BYTES:]
            whole = whole[:HEADER_BYTES]
        work = self._group.send([whole], self._other, int(tag))
        work.wait(datetime.timedelta(seconds=FOREVER))

    def receive(self, whole: Tensor, tag: Tag, *, seconds: float = FOREVER) -> Tensor:
        """Receive a message of exactly this size, whole; returns it."""
        room = self._rooms.get(tag)
        travels = whole if room is None else whole[:HEADER_BYTES]
        work = self._group.recv([travels], self._other, int(tag))
        work.wait(datetime.timedelta(seconds=seconds))
        if room is not None and room.data_ptr() != whole.data_ptr():
            whole[HEADER_BYTES:] = room[HEADER_BYTES : len(whole)]
        return whole

    def send_push(self, whole: Tensor) -> None:
        """Send a push. Without a room its payload stays here until the shard asks for it."""
        if Tag.PUSH in self._rooms or len(whole) == HEADER_BYTES:
            self.send(whole, Tag.PUSH)
            return
        self.send(whole[:HEADER_BYTES], Tag.PUSH)
        self.send(whole[HEADER_BYTES:], Tag.PAYLOAD)

    def receive_payload(self, whole: Tensor, turns: Turns) -> None:
        """Receive the payload of a push whose header has come, when it is its turn."""
        payload = whole[HEADER_BYTES:]
        if Tag.PUSH in self._rooms or not len(payload):
            return
        with turns.turn(len(payload)):
            self.receive(payload, Tag.PAYLOAD)

    def close(self) -> None:
        """End the session: calls that wait, here and at the other end, raise RuntimeError. Gloo
        closes a group's connections when one receive is late, so ask for one that can't come."""
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([nothing], self._other, int(Tag.NOTHING))
            work.wait(datetime.timedelta(milliseconds=1))
