"""Session: two processes and a Gloo group of their own, whose end leaves all others as they are.

    replica 0 --- session --- shard 0        a process that dies closes its own connections;
    replica 1 --- session --- shard 0        the other sessions go on

Ends on one host have a room: memory that both map, in which pushes and parameters lie, so that only
their headers travel.

    room       | header, push | header, parameters |    each written by one end, read by the other
    Gloo         header -->     <-- header              says that the message in the room is whole

Sessions find each other in a torch.distributed store, which a process that outlives them serves.
Neither the store nor Gloo asks who connects: let both listen on private addresses only.
"""

from __future__ import annotations

import contextlib
import datetime
import mmap
import os
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.parameter_server.messages import HEADER_BYTES, message
from pyops.torch_private import another_connection

__all__ = ["Room", "Session", "Tag", "own_connection", "rendezvous"]

OPENING = 20.0  # seconds that one end waits for the other
FOREVER = 365 * 86400.0


class Tag(IntEnum):
    """The channels of a session: pushes and fetches do not wait for each other."""

    VALUES = 1
    PUSH = 2
    PUSH_REPLY = 3
    FETCH = 4
    FETCH_REPLY = 5
    NOTHING = 6


def own_connection(store: dist.Store) -> dist.Store:
    """Another connection to the same store, so that a thread that waits keeps no other thread
    waiting."""
    found = another_connection(store)
    found.set_timeout(datetime.timedelta(seconds=OPENING))
    return found


def rendezvous(store: dist.Store) -> dist.Store:
    """Where shards and replicas leave notes for each other."""
    return dist.PrefixStore("pyops/parameter_server", own_connection(store))


class Room:
    """Memory of both ends of a session: a file without a name, which ends with the processes that
    have it. One end makes it, the other opens its `address`.

    Args:
        file: Its number in this process.
        push_bytes: Of the payload of a push.
        fetch_bytes: Of the payload of a fetch's answer.

    Raises:
        OSError: The file is of another size than both payloads ask for, or can't be mapped.
    """

    def __init__(self, file: int, push_bytes: int, fetch_bytes: int) -> None:
        sizes = [HEADER_BYTES + _whole_lines(size) for size in (push_bytes, fetch_bytes)]
        self._file = file
        if os.fstat(file).st_size != sum(sizes):
            raise OSError(f"a room of {os.fstat(file).st_size} bytes for messages of {sizes}")
        whole = torch.frombuffer(mmap.mmap(file, sum(sizes)), dtype=torch.uint8)
        self.pushes, self.fetches = whole[: sizes[0]], whole[sizes[0] :]

    @classmethod
    def make(cls, push_bytes: int, fetch_bytes: int) -> Room:
        """A new one. OSError where there is no memory for it."""
        file = os.memfd_create("pyops-session", os.MFD_CLOEXEC)
        try:
            size = 2 * HEADER_BYTES + _whole_lines(push_bytes) + _whole_lines(fetch_bytes)
            os.posix_fallocate(file, 0, size)
            return cls(file, push_bytes, fetch_bytes)
        except OSError:
            os.close(file)
            raise

    @property
    def address(self) -> list[int]:
        """What the other end opens it by."""
        return [os.getpid(), self._file]

    @classmethod
    def open(cls, address: list[int], push_bytes: int, fetch_bytes: int) -> Room:
        """That of the other end, on the same host. OSError where it can't be opened."""
        process, number = map(int, address)
        file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(file, push_bytes, fetch_bytes)
        finally:
            os.close(file)

    def close(self) -> None:
        """Close the file: nobody can open the room any more. Its memory stays."""
        os.close(self._file)


def _whole_lines(size: int) -> int:
    """Rounded up to whole lines of a cache."""
    return -(-size // 64) * 64


class Session:
    """One end of a session. RuntimeError of any call: the other end is gone.

    Args:
        store: Where both ends meet.
        name: Of the session, another one each time.
        end: 0 for the shard, 1 for the replica.
        room: Memory of both ends; None: messages travel whole.
    """

    def __init__(self, store: dist.Store, *, name: str, end: int, room: Room | None = None) -> None:
        self._other = 1 - end
        self._rooms = {} if room is None else {Tag.PUSH: room.pushes, Tag.FETCH_REPLY: room.fetches}
        timeout = datetime.timedelta(seconds=OPENING)
        place = dist.PrefixStore(name, own_connection(store))
        self._group: Any = dist.ProcessGroupGloo(place, end, 2, timeout)

    def buffer(self, tag: Tag, payload_bytes: int) -> Tensor:
        """Where a message of this channel is best written, or received: in the room, where there is
        one. It is overwritten by the channel's next message."""
        if tag in self._rooms:
            return self._rooms[tag][: HEADER_BYTES + payload_bytes]
        return message(payload_bytes)

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

    def close(self) -> None:
        """End the session: calls that wait, here and at the other end, raise RuntimeError. Gloo
        closes a group's connections when one receive is late, so ask for one that can't come."""
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([nothing], self._other, int(Tag.NOTHING))
            work.wait(datetime.timedelta(milliseconds=1))
