"""Session: two processes and a Gloo group of their own, whose end leaves all others as they are.

    replica 0 --- session --- shard 0        a process that dies closes its own connections;
    replica 1 --- session --- shard 0        the other sessions go on

Ends on one host have a room: memory that both map, in which pushes and parameters lie, so that only
their headers travel.

    room       | header, push | header, parameters |    each written by one end, read by the other
    Gloo         header -->     <-- header              says that the message in the room is whole

Without a codec a push lies in the memory of the replica's gradients instead, where they were
computed, and all shards of its host read their parts there.

A shard's parameters lie in such memory, too, and are read there. Before they change, the shard
copies them into the room of each replica that may still be reading.

Sessions find each other in a torch.distributed store, which a process that outlives them serves.
Neither the store nor Gloo asks who connects: let both listen on private addresses only.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.parameter_server.messages import HEADER_BYTES, Fetched, Reply, message
from pyops.parameter_server.sessions.turns import Turns
from pyops.torch_private import another_connection

__all__ = [
    "LOADS_IN_ORDER",
    "Gradients",
    "LentParameters",
    "Memory",
    "Room",
    "Session",
    "Tag",
    "own_connection",
    "rendezvous",
]

OPENING = 20.0  # seconds that one end waits for the other
LOOK_EVERY = 0.05  # seconds, meanwhile
FOREVER = 365 * 86400.0
LINE_BYTES = 64  # of a cache
COPIED, READ = 0, 1  # numbers of a room's last line
# A replica reads parameters and only then whether they were copied, which holds where the processor
# keeps the order of loads and of stores, as the memory model of x86 does.
LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


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


class Memory:
    """Bytes that processes of one host map: a file without a name, which ends with the processes
    that have it. One makes it, others open its `address`.

    Args:
        file: Its number in this process.

    Attributes:
        bytes: All of it, uint8.
    """

    def __init__(self, file: int) -> None:
        self._file = file
        mapped = mmap.mmap(file, os.fstat(file).st_size)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._close = weakref.finalize(self, os.close, file)

    @classmethod
    def make(cls, name: str, size: int) -> Memory:
        """New bytes, all 0. OSError where there is no memory for them."""
        if not hasattr(os, "memfd_create"):
            raise OSError("files without a name are Linux's")
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, size)
            return cls(file)
        except OSError:
            os.close(file)
            raise

    @property
    def address(self) -> list[int]:
        """What another process opens it by."""
        return [os.getpid(), self._file]

    @classmethod
    def open(cls, address: list[int]) -> Memory:
        """That of another process, on the same host. OSError where it can't be opened."""
        process, number = map(int, address)
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = cls(file)
        except BaseException:
            os.close(file)
            raise
        found.close()
        return found

    def close(self) -> None:
        """Close the file: nobody can open it any more. The bytes stay."""
        self._close()


class Gradients:
    """Two flat vectors of a replica, in memory that the shards of its host read: gradients are
    computed in one while a push is read in the other. The replica makes them.

    Args:
        memory: The bytes of both.
        numel: Numbers of each.
        dtype: Their dtype.

    Raises:
        OSError: The memory is of another size.
    """

    def __init__(self, memory: Memory, numel: int, dtype: torch.dtype) -> None:
        size = _whole_lines(numel * dtype.itemsize)
        if len(memory.bytes) != 2 * size:
            raise OSError(f"memory of {len(memory.bytes)} bytes for two vectors of {numel} {dtype}")
        self._memory = memory
        self.vectors = [half.view(dtype)[:numel] for half in memory.bytes.split(size)]

    @classmethod
    def make(cls, numel: int, dtype: torch.dtype) -> Gradients:
        """New ones, zero. OSError where there is no memory for them."""
        size = 2 * _whole_lines(numel * dtype.itemsize)
        return cls(Memory.make("pyops-session-gradients", size), numel, dtype)

    @property
    def address(self) -> list[int]:
        """What a shard opens them by, until they are closed."""
        return self._memory.address

    @classmethod
    def open(cls, address: list[int], numel: int, dtype: torch.dtype) -> Gradients:
        """Those of a replica on this host. OSError where they can't be opened."""
        return cls(Memory.open(address), numel, dtype)

    def part(self, start: int, numel: int) -> list[Tensor]:
        """The same numbers of both."""
        return [vector[start : start + numel] for vector in self.vectors]

    def close(self) -> None:
        """Close the file: no shard can open them any more. The numbers stay."""
        self._memory.close()


class Room:
    """Memory of both ends of a session. The replica makes it, the shard opens its `address`.

    Args:
        memory: The bytes.
        push_bytes: Of the payload of a push.
        fetch_bytes: Of the payload of a fetch's answer.

    Raises:
        OSError: The memory is of another size than both payloads ask for.
    """

    def __init__(self, memory: Memory, push_bytes: int, fetch_bytes: int) -> None:
        sizes = _sizes(push_bytes, fetch_bytes)
        if len(memory.bytes) != sum(sizes):
            raise OSError(f"a room of {len(memory.bytes)} bytes for messages of {sizes[:2]}")
        self._memory, self._fetch_bytes = memory, fetch_bytes
        parts: list[Tensor] = list(memory.bytes.split(sizes))
        self.pushes, self.fetches = parts[:2]
        self._numbers = parts[2].view(torch.int64)

    @classmethod
    def make(cls, push_bytes: int, fetch_bytes: int) -> Room:
        """A new one. OSError where there is no memory for it."""
        memory = Memory.make("pyops-session", sum(_sizes(push_bytes, fetch_bytes)))
        return cls(memory, push_bytes, fetch_bytes)

    @property
    def address(self) -> list[int]:
        """What the other end opens it by."""
        return self._memory.address

    @classmethod
    def open(cls, address: list[int], push_bytes: int, fetch_bytes: int) -> Room:
        """That of the other end, on the same host. OSError where it can't be opened."""
        return cls(Memory.open(address), push_bytes, fetch_bytes)

    def close(self) -> None:
        """Close the file: nobody can open the room any more. Its memory stays."""
        self._memory.close()

    # The two numbers of a fetch whose parameters are read where they lie; neither end waits.
    #     shard      looks at READ, copies, writes COPIED, changes the parameters
    #     replica    reads the parameters, looks at COPIED, reads the copy, writes READ
    # A replica that has seen a changed number sees COPIED, which was written before it.

    def settle(self, number: int, values: Tensor) -> None:
        """The shard's end, before its parameters change: copy them, unless fetch `number` has been
        read."""
        if int(self._numbers[READ]) != number:
            payload = self.fetches[HEADER_BYTES : HEADER_BYTES + self._fetch_bytes]
            payload.view(values.dtype).copy_(values)
            self._numbers[COPIED] = number

    def lent(self, number: int, parameters: Tensor) -> Iterator[Tensor]:
        """The replica's end: what fetch `number` is to read, and its copy where the parameters may
        have changed meanwhile."""
        yield parameters
        if int(self._numbers[COPIED]) == number:
            yield self.fetches[HEADER_BYTES : HEADER_BYTES + self._fetch_bytes]
        self._numbers[READ] = number


class LentParameters(Fetched):
    """Parameters that are read in the shard's memory.

    Args:
        answer: The reply's message.
        number: Of the fetch.
        room: Where the copy lies, if one is made.
        parameters: The shard's, as bytes.
    """

    def __init__(self, answer: Tensor, *, number: int, room: Room, parameters: Tensor) -> None:
        super().__init__(answer, whole=True)
        self._number, self._room, self._parameters = number, room, parameters

    def payloads(self) -> Iterator[Tensor]:
        """The parameters, and the copy where they have changed meanwhile."""
        yield from self._room.lent(self._number, self._parameters)


def _sizes(push_bytes: int, fetch_bytes: int) -> list[int]:
    """Bytes of a room's parts: both messages, and a line of numbers."""
    return [*(HEADER_BYTES + _whole_lines(size) for size in (push_bytes, fetch_bytes)), LINE_BYTES]


def _whole_lines(size: int) -> int:
    """Rounded up to whole lines of a cache."""
    return -(-size // LINE_BYTES) * LINE_BYTES


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
