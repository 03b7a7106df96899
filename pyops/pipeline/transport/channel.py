"""SendChannel and ReceiveChannel: what one rank sends another, activations or gradients, in the
order of the schedule; no rank waits that need not.

    rank 0, sends    | 0F0 | 0F1 | 0F2 |      a copy is sent on while the next action computes
    rank 1, receives |     | 0F0 | 0F1 |      receives are posted ahead: a message comes while the
                                              one before is used

A receive must be posted with its size before anything is known of the message. Both sides therefore
remember how long the message at each place of the channel was in the step before: that is posted,
and if what is sent is longer, the first message only tells its length, and a second one has it all.
So shapes may change at any time, and cost one message when they grow.

Where both ranks are on one host, messages that were short the last time go through shared memory
(see `mailboxes`): the group takes longer to tell of a message than these take to be copied.

Where the two ranks have a group for the tensors of this channel alone (`DeviceGroup`, for NCCL), a
message holds the shape only, and the tensors follow by that group, from device to device; otherwise
those of a GPU are copied to the host and back.

A rank that failed still sends every message it owes, marked as such: the others end the step with
it, and can go on afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyops import flight_record
from pyops.comm.failure import PeerError
from pyops.pipeline.schedules.orders import Transfer
from pyops.pipeline.transport.message import (
    HEADER,
    MessageLayout,
    empty_tensors,
    lay_out,
    pack,
    restore,
    to_device,
    unpack,
)

__all__ = ["FAILED", "ChannelPeer", "DeviceGroup", "Edge", "ReceiveChannel", "SendChannel"]

Edge = tuple[str, int, int]  # kind, source stage, target stage

NOTHING, LONGER, SEPARATE, ABORTED = 1, 2, 4, 8  # flags of a message
MIN_BYTES = 256  # of the messages of a first step
MAILBOX_BYTES = 1 << 16  # messages up to this size go through shared memory where there is some
NUM_POSTED = 2  # receives that are posted before their time
SPINS = 64


class Failed:
    """In place of a value: there is none, because a rank failed."""


FAILED = Failed()


class DeviceGroup(NamedTuple):
    """Sends tensors from device to device: `group`, torch's backend itself, has the channel's two
    ranks and carries nothing else; `peer` is the other rank in it."""

    group: Any
    peer: int


@dataclass(frozen=True)
class ChannelPeer:
    """The other end of a channel, and what carries messages to or from it."""

    group: dist.ProcessGroup
    """The ranks of the pipeline; carries CPU tensors."""

    rank: int
    """The peer's rank in it."""

    tag: int
    """The first of two tags that only this channel uses in this direction."""

    mailbox: Any = None
    """This side's end of a mailbox in shared memory (`pyops._native.Mailbox`), or None."""

    device_group: DeviceGroup | None = None
    """What carries the tensors themselves, where they go from device to device."""


class SendChannel:
    """The sending side: `num_messages` messages a step to `peer`."""

    def __init__(self, peer: ChannelPeer, *, num_messages: int) -> None:
        self.peer = peer
        self.sizes = [MIN_BYTES] * num_messages
        self.position = 0
        self.bytes_sent = 0
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._unmailed: deque[Tensor] = deque()

    def send(self, value: Any, *, what: str) -> None:
        """Start sending; `value` may be changed afterwards. TypeError, which names `what`, for one
        that can't be sent."""
        layout = lay_out(value, what=what)
        tensors, devices = layout.tensors, self.peer.device_group
        if devices is not None:
            layout = MessageLayout(layout.shape, [])
        size, posted = layout.end, self.sizes[self.position]
        short = self._is_short()
        if size <= (MAILBOX_BYTES if short else posted):
            self._start(self._packed(layout, size if short else posted), short=short)
        else:
            message = self._packed(layout, size)  # before anything is on its way: this may fail
            self._start(_header(LONGER, size, HEADER.size if short else posted), short=short)
            self._post(message, self.peer.tag + 1)
        if devices is not None:
            for tensor in tensors:
                if tensor.numel():
                    self._carry(
                        devices.group, tensor.detach().contiguous(), devices.peer, self.peer.tag
                    )
        self._next(size)

    def fail(self) -> None:
        """Send, at the place of the next message, that there is none."""
        short = self._is_short()
        posted = HEADER.size if short else self.sizes[self.position]
        self._start(_header(NOTHING, 0, posted), short=short)
        self._next(0)

    def abort(self) -> None:
        """Tell a peer that waits at its mailbox that nothing more will come. The group tells the
        others, by closing."""
        message = _header(ABORTED, 0, HEADER.size)
        if self.peer.mailbox is not None:
            # The peer first reads what is in the mailbox; what found no room there is not needed
            # any more.
            self.peer.mailbox.put(message.data_ptr(), len(message))

    def close(self) -> None:
        """Let go of the group from device to device."""
        _close(self.peer)

    def finish(self) -> None:
        """Wait until everything is on its way to the peer. PeerError."""
        while not self.flush():
            time.sleep(5e-5)
        while self._in_flight:
            self._wait()
        self.position = 0

    def flush(self) -> bool:
        """Whether everything is in the mailbox; what had found no room there is tried again."""
        while self._unmailed and self.peer.mailbox.put(
            self._unmailed[0].data_ptr(), len(self._unmailed[0])
        ):
            self._unmailed.popleft()
        return not self._unmailed

    def _is_short(self) -> bool:
        """Whether the next message goes through the mailbox: both sides know by its last size."""
        return self.peer.mailbox is not None and self.sizes[self.position] <= MAILBOX_BYTES

    def _next(self, size: int) -> None:
        self.sizes[self.position] = max(size, MIN_BYTES)
        self.position += 1

    def _start(self, message: Tensor, *, short: bool) -> None:
        if not short:
            return self._post(message, self.peer.tag)
        self.bytes_sent += len(message)
        if self._unmailed or not self.peer.mailbox.put(message.data_ptr(), len(message)):
            self._unmailed.append(message)

    def _post(self, message: Tensor, tag: int) -> None:
        self._carry(self.peer.group, message, self.peer.rank, tag)

    def _carry(self, group: Any, tensor: Tensor, rank: int, tag: int) -> None:
        self.bytes_sent += tensor.nbytes
        try:
            # The tensor stays referenced until its send is over: torch does not keep it.
            self._in_flight.append((group.send([tensor], rank, tag), tensor))
        except RuntimeError as error:
            raise PeerError(self.peer.rank, error) from error
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._wait()

    def _packed(self, layout: MessageLayout, num_bytes: int) -> Tensor:
        flags = 0 if self.peer.device_group is None else SEPARATE
        return pack(layout, num_bytes=num_bytes, flags=flags)

    def _wait(self) -> None:
        work, _ = self._in_flight.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer.rank, error) from error


class ReceiveChannel:
    """The receiving side: as many messages a step from `peer` as there are `transfers`.

    Args:
        peer: The sending rank.
        transfers: What the messages of a step are, in their order.
        timeout: Seconds after which a message of the mailbox is late.
        flush: Called while this side waits, until it returns that nothing of this rank's own waits
            to be sent: the peer may need it before it sends on.
        device: Where the tensors shall be.
    """

    def __init__(
        self,
        peer: ChannelPeer,
        *,
        transfers: Sequence[Transfer],
        timeout: float = 1800.0,
        flush: Callable[[], bool] = lambda: True,
        device: torch.device | None = None,
    ) -> None:
        self.peer, self.device = peer, device or torch.device("cpu")
        self.transfers, self.timeout, self.flush = tuple(transfers), timeout, flush
        self.sizes = [MIN_BYTES] * len(self.transfers)
        self.position = 0
        self.delay_ns = 0  # added to the way of every message, to try out slow links
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._num_looked_at = 0  # places of the step whose receives are posted if they need one

    def start(self) -> None:
        """Post the first receives of a step."""
        self.position = self._num_looked_at = 0
        self._post_ahead()

    def close(self) -> None:
        """Let go of the group from device to device."""
        _close(self.peer)

    def receive(self) -> tuple[Transfer, Any, int]:
        """(transfer, value, nanosecond at which it was packed) of the next message; the value
        FAILED of a rank that failed."""
        if flight_record.active() is None:  # without what a context manager takes for a message
            return self._receive()
        with flight_record.message(self.peer.group, "receive", peer=self.peer.rank):
            return self._receive()

    def _receive(self) -> tuple[Transfer, Any, int]:
        short = self.peer.mailbox is not None and self.sizes[self.position] <= MAILBOX_BYTES
        message = self._mailed() if short else self._waited(self._posted.popleft())
        view = message.numpy().data
        flags, size, _, packed_ns = header = HEADER.unpack_from(view)
        if flags & ABORTED:
            raise PeerError(self.peer.rank, "it gave up")
        if flags & LONGER:  # comes under a tag of its own, past the receives that are posted
            message = self._waited(self._post(size, self.peer.tag + 1))
            view = message.numpy().data
            flags, size, _, packed_ns = header = HEADER.unpack_from(view)
        self.sizes[self.position] = max(size, MIN_BYTES)
        transfer = self.transfers[self.position]
        self.position += 1
        self._post_ahead()
        if self.delay_ns:
            time.sleep(max(0, packed_ns + self.delay_ns - time.monotonic_ns()) / 1e9)
        if flags & NOTHING:
            return transfer, FAILED, packed_ns
        if flags & SEPARATE:
            shape = bytes(view[HEADER.size : HEADER.size + header[2]])
            return transfer, self._receive_separate(shape), packed_ns
        value = unpack(message, view, header)
        if self.device.type != "cpu":
            value = to_device(value, self.device)
        return transfer, value, packed_ns

    def _receive_separate(self, shape: bytes) -> Any:
        """The value of a message whose tensors come from device to device."""
        devices = self.peer.device_group
        assert devices is not None
        tensors = empty_tensors(shape, self.device)
        try:
            works = [
                devices.group.recv([t], devices.peer, self.peer.tag) for t in tensors if t.numel()
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer.rank, error) from error
        return restore(shape, tensors)

    def _post_ahead(self) -> None:
        end = min(self.position + NUM_POSTED, len(self.sizes))
        while self._num_looked_at < end:
            size = self.sizes[self._num_looked_at]
            if self.peer.mailbox is None or size > MAILBOX_BYTES:
                self._posted.append(self._post(size, self.peer.tag))
            self._num_looked_at += 1

    def _post(self, size: int, tag: int) -> tuple[Any, Tensor]:
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            return self.peer.group.recv([message], self.peer.rank, tag), message
        except RuntimeError as error:
            raise PeerError(self.peer.rank, error) from error

    def _waited(self, posted: tuple[Any, Tensor]) -> Tensor:
        work, message = posted
        try:
            while not self.flush() and not work.is_completed():
                time.sleep(5e-5)
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer.rank, error) from error
        return message

    def _mailed(self) -> Tensor:
        """The next message of the mailbox. It waits without the interpreter lock once nothing of
        this rank's own is left to send."""
        mailbox, end = self.peer.mailbox, time.monotonic() + self.timeout
        while not self.flush() and not mailbox.ready() and time.monotonic() < end:
            time.sleep(5e-5)
        size = mailbox.wait(SPINS, self.timeout)
        if size < 0:
            raise PeerError(
                self.peer.rank,
                "it died" if size == -2 else f"no sign of it within {self.timeout:g} s",
            )
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        mailbox.take(message.data_ptr())
        return message


def _header(flags: int, size: int, num_bytes: int) -> Tensor:
    message = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    HEADER.pack_into(message.numpy().data, 0, flags, size, 0, time.monotonic_ns())
    return message


def _close(peer: ChannelPeer) -> None:
    if peer.device_group is not None:
        peer.device_group.group.shutdown()
