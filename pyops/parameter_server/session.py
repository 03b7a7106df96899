"""Session: two processes and a Gloo group of their own, whose end leaves all others as they are.

    replica 0 --- session --- shard 0        a process that dies closes its own connections;
    replica 1 --- session --- shard 0        the other sessions go on

Sessions find each other in a torch.distributed store, which a process that outlives them serves.
Neither the store nor Gloo asks who connects: let both listen on private addresses only.
"""

from __future__ import annotations

import contextlib
import datetime
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.torch_private import another_connection

__all__ = ["Session", "Tag", "own_connection", "rendezvous"]

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


class Session:
    """One end of a session. RuntimeError of any call: the other end is gone.

    Args:
        store: Where both ends meet.
        name: Of the session, another one each time.
        end: 0 for the shard, 1 for the replica.
    """

    def __init__(self, store: dist.Store, *, name: str, end: int) -> None:
        self._other = 1 - end
        timeout = datetime.timedelta(seconds=OPENING)
        place = dist.PrefixStore(name, own_connection(store))
        self._group: Any = dist.ProcessGroupGloo(place, end, 2, timeout)

    def send(self, message: Tensor, tag: Tag) -> None:
        """Send a message, and wait until it is on its way."""
        work = self._group.send([message], self._other, int(tag))
        work.wait(datetime.timedelta(seconds=FOREVER))

    def receive(self, message: Tensor, tag: Tag, *, seconds: float = FOREVER) -> Tensor:
        """Receive a message of exactly this size, whole; returns it."""
        work = self._group.recv([message], self._other, int(tag))
        work.wait(datetime.timedelta(seconds=seconds))
        return message

    def close(self) -> None:
        """End the session: calls that wait, here and at the other end, raise RuntimeError. Gloo
        closes a group's connections when one receive is late, so ask for one that can't come."""
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        with contextlib.suppress(RuntimeError):
            work = self._group.recv([nothing], self._other, int(Tag.NOTHING))
            work.wait(datetime.timedelta(milliseconds=1))
