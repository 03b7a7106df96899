"""Channel: what one rank sends another, activations or gradients, in the order of the schedule;
nobody waits who need not.

    rank 0, sends    | 0F0 | 0F1 | 0F2 |          a copy is sent on while the next action computes
    rank 1, receives |     | 0F0 | 0F1 |          receives are posted ahead, so a message comes while the one before is used

A receive must be posted with its size before anything is known of the message. Both sides therefore
remember how long the message at each place of the channel was in the step before: that is posted,
and if what is sent is longer, the first message only tells its length, and a second one has it all.
So shapes may change at any time, and cost one message when they grow.

Where both ranks are on one host, messages that were short the last time go through shared memory
(see `Mailboxes`): the group takes longer to tell of a message than these take to be copied.

Where the two ranks have a group for the tensors of this channel alone (`DeviceGroup`, for NCCL), a
message holds the shape only, and the tensors follow by that group, from device to device; else
those of a GPU are copied to the host and back.

A rank that failed still sends every message it owes, marked as such: the others end the step with
it, and can go on afterwards.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.failure import PeerError
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

__all__ = ["FAILED", "DeviceGroup", "Edge", "ReceiveChannel", "SendChannel"]

Edge = tuple[str, int, int]  # kind, source stage, target stage

NOTHING, LONGER, SEPARATE, ABORTED = 1, 2, 4, 8  # flags of a message
SMALLEST = 256  # bytes of the messages of a first step
SHORT = 1 << 16  # bytes of messages that go through shared memory where there is some
AHEAD = 2  # receives that are posted before their time
SPINS = 64


class Failed:
    """In place of a value: there is none, because a rank failed."""


FAILED = Failed()


class DeviceGroup(NamedTuple):
    """How tensors go from device to device: by a group of the channel's two ranks that carries
    nothing else, which is torch's backend itself; the peer in it."""

    group: Any
    peer: int


class SendChannel:
    """The sending side: `length` messages a step to group rank `peer`. mailbox: this side's end of
    one, or None."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        tag: int,
        length: int,
        mailbox: Any = None,
        direct: DeviceGroup | None = None,
    ) -> None:
        self.group, self.peer, self.tag, self.mailbox, self.direct = (
            group,
            peer,
            tag,
            mailbox,
            direct,
        )
        self.sizes = [SMALLEST] * length
        self.place = 0
        self.bytes_sent = 0
        self._under_way: deque[tuple[Any, Tensor]] = deque()
        self._unmailed: deque[Tensor] = deque()

    def send(self, value: Any, *, what: str) -> None:
        """Start sending; `value` may be changed afterwards. TypeError, which names `what`, for one
        that can't be sent."""
        layout = lay_out(value, what=what)
        tensors = layout.tensors
        if self.direct is not None:
            layout = MessageLayout(layout.shape, [])
        size, room = layout.end, self.sizes[self.place]
        short = self.mailbox is not None and room <= SHORT
        if size <= (SHORT if short else room):
            self._start(self._packed(layout, size if short else room), short=short)
        else:
            message = self._packed(layout, size)  # before anything is on its way: this may fail
            self._start(_header(LONGER, size, HEADER.size if short else room), short=short)
            self._post(message, self.tag + 1)
        if self.direct is not None:
            for tensor in tensors:
                if tensor.numel():
                    self._carry(
                        self.direct.group, tensor.detach().contiguous(), self.direct.peer, self.tag
                    )
        self._next(size)

    def fail(self) -> None:
        """Send, at the place of the next message, that there is none."""
        room = self.sizes[self.place]
        short = self.mailbox is not None and room <= SHORT
        self._start(_header(NOTHING, 0, HEADER.size if short else room), short=short)
        self._next(0)

    def abort(self) -> None:
        """Tell a peer that waits at its mailbox that nothing more will come. The group tells the
        others, by closing."""
        message = _header(ABORTED, 0, HEADER.size)
        if (
            self.mailbox is not None
        ):  # which is read to its end first, and what found no room there is not needed any more
            self.mailbox.put(message.data_ptr(), len(message))

    def finish(self) -> None:
        """Wait until everything is on its way to the peer. PeerError."""
        while not self.flush():
            time.sleep(5e-5)
        while self._under_way:
            self._wait()
        self.place = 0

    def flush(self) -> bool:
        """Whether everything is in the mailbox; what had found no room there is tried again."""
        while self._unmailed and self.mailbox.put(
            self._unmailed[0].data_ptr(), len(self._unmailed[0])
        ):
            self._unmailed.popleft()
        return not self._unmailed

    def _next(self, size: int) -> None:
        self.sizes[self.place] = max(size, SMALLEST)
        self.place += 1

    def _start(self, message: Tensor, *, short: bool) -> None:
        if not short:
            return self._post(message, self.tag)
        self.bytes_sent += len(message)
        if self._unmailed or not self.mailbox.put(message.data_ptr(), len(message)):
            self._unmailed.append(message)

    def _post(self, message: Tensor, tag: int) -> None:
        self._carry(self.group, message, self.peer, tag)

    def _carry(self, group: Any, tensor: Tensor, peer: int, tag: int) -> None:
        self.bytes_sent += tensor.nbytes
        try:
            self._under_way.append((group.send([tensor], peer, tag), tensor))
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error
        while self._under_way and self._under_way[0][0].is_completed():
            self._wait()

    def _packed(self, layout: MessageLayout, room: int) -> Tensor:
        return pack(layout, room=room, flags=0 if self.direct is None else SEPARATE)

    def _wait(self) -> None:
        work, _ = self._under_way.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error


class ReceiveChannel:
    """The receiving side: as many messages a step from group rank `peer` as there are `transfers`.

    mailbox: this side's end of one, or None. timeout: seconds after which a message there is late.
    While it waits it calls `flush`, until that says that nothing of this rank's own waits to be
    sent: a peer may need it before it sends on. device: where the tensors shall be.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        tag: int,
        transfers: Sequence[Any],
        mailbox: Any = None,
        timeout: float = 1800.0,
        flush: Callable[[], bool] = lambda: True,
        direct: DeviceGroup | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.group, self.peer, self.tag, self.mailbox, self.direct = (
            group,
            peer,
            tag,
            mailbox,
            direct,
        )
        self.device = device or torch.device("cpu")
        self.transfers, self.timeout, self.flush = tuple(transfers), timeout, flush
        self.sizes = [SMALLEST] * len(self.transfers)
        self.place = 0
        self.delay_ns = 0  # what every message takes longer than it does, to try out slow links
        self._posted: deque[tuple[Any, Tensor]] = deque()
        self._ahead = 0  # the first place whose receive may be still to post

    def start(self) -> None:
        """Post the first receives of a step."""
        self.place = self._ahead = 0
        self._look_ahead()

    def receive(self) -> tuple[Any, Any, int]:
        """(transfer, value, nanosecond at which it was made) of the next message; the value FAILED
        of a rank that failed."""
        short = self.mailbox is not None and self.sizes[self.place] <= SHORT
        message = self._mailed() if short else self._waited(self._posted.popleft())
        view = message.numpy().data
        flags, size, _, made = head = HEADER.unpack_from(view)
        if flags & ABORTED:
            raise PeerError(self.peer, "it gave up")
        if flags & LONGER:  # comes under a tag of its own, past the receives that are posted
            message = self._waited(self._post(size, self.tag + 1))
            view = message.numpy().data
            flags, size, _, made = head = HEADER.unpack_from(view)
        self.sizes[self.place] = max(size, SMALLEST)
        transfer = self.transfers[self.place]
        self.place += 1
        self._look_ahead()
        if self.delay_ns:
            time.sleep(max(0, made + self.delay_ns - time.monotonic_ns()) / 1e9)
        if flags & NOTHING:
            return transfer, FAILED, made
        if flags & SEPARATE:
            return (
                transfer,
                self._receive_separate(bytes(view[HEADER.size : HEADER.size + head[2]])),
                made,
            )
        value = unpack(message, view, head)
        return transfer, value if self.device.type == "cpu" else to_device(value, self.device), made

    def _receive_separate(self, shape: bytes) -> Any:
        """The value of a message whose tensors come from device to device."""
        assert self.direct is not None
        tensors = empty_tensors(shape, self.device)
        try:
            works = [
                self.direct.group.recv([t], self.direct.peer, self.tag)
                for t in tensors
                if t.numel()
            ]
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error
        return restore(shape, tensors)

    def _look_ahead(self) -> None:
        end = min(self.place + AHEAD, len(self.sizes))
        while self._ahead < end:
            size = self.sizes[self._ahead]
            if self.mailbox is None or size > SHORT:
                self._posted.append(self._post(size, self.tag))
            self._ahead += 1

    def _post(self, size: int, tag: int) -> tuple[Any, Tensor]:
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            return self.group.recv([message], self.peer, tag), message
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error

    def _waited(self, posted: tuple[Any, Tensor]) -> Tensor:
        work, message = posted
        try:
            while not self.flush() and not work.is_completed():
                time.sleep(5e-5)
            work.wait()
        except RuntimeError as error:
            raise PeerError(self.peer, error) from error
        return message

    def _mailed(self) -> Tensor:
        end = time.monotonic() + self.timeout
        while not self.flush() and not self.mailbox.ready() and time.monotonic() < end:
            time.sleep(5e-5)
        size = self.mailbox.wait(SPINS, self.timeout)
        if size < 0:
            raise PeerError(
                self.peer, "it died" if size == -2 else f"no sign of it within {self.timeout:g} s"
            )
        message = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.mailbox.take(message.data_ptr())
        return message


def _header(flags: int, size: int, room: int) -> Tensor:
    message = torch.empty(room, dtype=torch.uint8, device="cpu")
    HEADER.pack_into(message.numpy().data, 0, flags, size, 0, time.monotonic_ns())
    return message
