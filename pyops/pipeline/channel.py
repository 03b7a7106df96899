"""Channel: what one rank sends another, activations or gradients, in the order of the schedule; nobody waits who need not.

    rank 0, sends    | 0F0 | 0F1 | 0F2 |          a copy is sent on while the next action computes
    rank 1, receives |     | 0F0 | 0F1 |          receives are posted ahead, so a message comes while the one before is used

A receive must be posted with its size before anything is known of the message. Both sides therefore remember how long the
message at each place of the channel was in the step before: that is posted, and if what is sent is longer, the first message
only tells its length, and a second one has it all. So shapes may change at any time, and cost one message when they grow.

A rank that failed still sends every message it owes, marked as such: the others end the step with it, and can go on afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.failure import PeerError
from pyops.pipeline.message import HEADER, Described, describe, unpack

__all__ = ["FAILED", "Incoming", "Outgoing"]

FAILED, LONGER = 1, 2  # flags of a message
SMALLEST = 256  # bytes of the messages of a first step
AHEAD = 2  # receives that are posted before their time


class Outgoing:
    """The sending side: `length` messages a step to group rank `peer`."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, tag: int, length: int) -> None:
        self.group, self.peer, self.tag = group, peer, tag
        self.sizes = [SMALLEST] * length
        self.place = 0
        self.bytes_sent = 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, value: Any, *, what: str) -> None:
        """Start sending; `value` may be changed afterwards. TypeError, which names `what`, for one that can't be sent."""
        described = describe(value, what=what)
        size = described.end
        if size <= self.sizes[self.place]:
            self._put(described, self.sizes[self.place], self.tag)
        else:
            self._start(_header(LONGER, size, self.sizes[self.place]), self.tag)
            self._put(described, size, self.tag + 1)
        self.sizes[self.place] = max(size, SMALLEST)
        self.place += 1

    def fail(self) -> None:
        """Send, at the place of the next message, that there is none."""
        self._start(_header(FAILED, 0, self.sizes[self.place]), self.tag)
        self.sizes[self.place] = SMALLEST
        self.place += 1

    def finish(self) -> None:
        """Wait until everything is on its way to the peer. PeerError."""
        while self._under_way:
            self._wait()
        self.place = 0

    def _put(self, described: Described, size: int, tag: int) -> None:
        message = torch.empty(size, dtype=torch.uint8)
        shape = described.shape
        view = message.numpy().data
        HEADER.pack_into(view, 0, 0, described.end, len(shape), time.monotonic_ns())
        view[HEADER.size : HEADER.size + len(shape)] = shape
        for tensor, at in zip(described.tensors, described.offsets, strict=True):
            if tensor.numel():
                nbytes = tensor.numel() * tensor.element_size()
                message[at : at + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        self._start(message, tag)

    def _start(self, message: Tensor, tag: int) -> None:
        self.bytes_sent += message.numel()
        try:
            self._under_way.append((self.group.send([message], self.peer, tag), message))
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error
        while self._under_way and self._under_way[0][0].is_completed():
            self._wait()

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error


class Incoming:
    """The receiving side: as many messages a step from group rank `peer` as there are `transfers`."""

    def __init__(self, group: dist.ProcessGroup, peer: int, *, tag: int, transfers: Sequence[Any]) -> None:
        self.group, self.peer, self.tag, self.transfers = group, peer, tag, tuple(transfers)
        self.sizes = [SMALLEST] * len(self.transfers)
        self.place = 0
        self.delay_ns = 0  # what every message takes longer than it does, to try out slow links
        self._posted: deque[tuple[Any, Tensor]] = deque()

    def start(self) -> None:
        """Post the first receives of a step."""
        self.place = 0
        for size in self.sizes[:AHEAD]:
            self._posted.append(self._post(size, self.tag))

    def receive(self) -> tuple[Any, Any, int]:
        """(transfer, value, nanosecond at which it was made) of the next message; the value FAILED of a rank that failed."""
        message = self._wait(self._posted.popleft())
        flags, size, _, made = head = HEADER.unpack_from(message.numpy().data)
        following = self.place + AHEAD
        if flags & LONGER:  # comes under a tag of its own, past the receives that are posted
            message = self._wait(self._post(size, self.tag + 1))
            flags, size, _, made = head = HEADER.unpack_from(message.numpy().data)
        self.sizes[self.place] = max(size, SMALLEST)
        if following < len(self.sizes):
            self._posted.append(self._post(self.sizes[following], self.tag))
        transfer = self.transfers[self.place]
        self.place += 1
        if self.delay_ns:
            time.sleep(max(0, made + self.delay_ns - time.monotonic_ns()) / 1e9)
        return transfer, FAILED if flags & FAILED else unpack(message, head), made

    def _post(self, size: int, tag: int) -> tuple[Any, Tensor]:
        message = torch.empty(size, dtype=torch.uint8)
        try:
            return self.group.recv([message], self.peer, tag), message
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error

    def _wait(self, posted: tuple[Any, Tensor]) -> Tensor:
        work, message = posted
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error
        return message


def _header(flags: int, size: int, room: int) -> Tensor:
    message = torch.empty(room, dtype=torch.uint8)
    HEADER.pack_into(message.numpy().data, 0, flags, size, 0, time.monotonic_ns())
    return message
