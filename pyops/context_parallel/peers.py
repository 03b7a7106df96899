"""Peers: some ranks of a group, and the few exchanges that attention over ranks is made of.

    gather         every rank's tensor to every rank           all-gather of keys and values
    sum_scattered  every rank's part for every rank, summed    gradients of keys and values
    swap           a tensor of its own for every rank          heads for tokens
    pass_on        to the next rank, from the one before       the ring

Written against a `Transport`: a process group, or threads of one process. Sums are in rank order,
in fp32 (float64 of float64), and rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyops.comm.collectives.transport import Pending, ProcessGroupTransport, Transport
from pyops.comm.failure import PeerError, lost_peer

__all__ = ["Peers", "Wire", "wide_dtype"]

_TAG = 0x706378  # keeps these messages apart from collectives that run on the same group meanwhile


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Wire:
    """Messages between the ranks of a group; an error names the rank that is lost.

    Attributes:
        rank, size: This rank's number, and how many there are.
        bytes_received, messages_received: Of all messages so far, and their number.
    """

    def __init__(self, transport: Transport, *, group: dist.ProcessGroup | None = None) -> None:
        self.transport = transport
        # A model does not keep a group alive that was destroyed, and with it its threads.
        self._group = None if group is None else weakref.ref(group)
        self.rank, self.size = transport.rank, transport.size
        self.bytes_received = self.messages_received = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Wire:
        """The messages of a process group."""
        return cls(ProcessGroupTransport(group, tag=_TAG), group=group)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; RuntimeError where the ranks are threads, or it was destroyed."""
        if self._group is None:
            raise RuntimeError("these ranks are threads of one process, and have no process group")
        if (group := self._group()) is None:
            raise RuntimeError(
                "the process group of these ranks was destroyed; make the model, or its "
                "ContextRanks, anew with another one"
            )
        return group

    def __deepcopy__(self, memo: dict[int, Any]) -> Wire:
        return self  # a copy of a model communicates with the same ranks

    def post(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Pending:
        """Start sending and receiving flat contiguous tensors; leave them alone until the wait."""
        try:
            pending = self.transport.post(sends, receives)
        except PeerError as error:
            raise self.lost(error) from error
        self.bytes_received += sum(t.numel() * t.element_size() for t, _ in receives)
        self.messages_received += len(receives)
        return _Named(pending, self)

    def lost(self, error: PeerError) -> Exception:
        """What to raise for an exchange that failed."""
        if self._group is None:
            return error
        return lost_peer("attention over ranks", group=self.group, cause=error, sequence=0)


class _Named:
    def __init__(self, pending: Pending, wire: Wire) -> None:
        self._pending, self._wire = pending, wire

    def wait(self) -> None:
        try:
            self._pending.wait()
        except PeerError as error:
            raise self._wire.lost(error) from error


class Peers:
    """Some ranks of a wire, numbered in an order of their own.

    Args:
        wire: Of all ranks of the group.
        members: Their numbers there; this rank is one of them.
    """

    def __init__(self, wire: Wire, members: Sequence[int]) -> None:
        self.wire, self.members = wire, tuple(members)
        self.index, self.size = self.members.index(wire.rank), len(self.members)

    def swap(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """What each member has for this rank, flat, in the members' order.

        Args:
            parts: Flat contiguous tensors of one dtype, one for each member.
            sizes: How many numbers come from each member.
        """
        own = parts[self.index]
        found = [own.new_empty(n) if j != self.index else own for j, n in enumerate(sizes)]
        others = [j for j in range(self.size) if j != self.index]
        self.wire.post(
            [(parts[j], self.members[j]) for j in others],
            [(found[j], self.members[j]) for j in others],
        ).wait()
        return found

    def gather(self, x: Tensor) -> list[Tensor]:
        """Every member's x, of one shape."""
        flat = x.contiguous().view(-1)
        found = self.swap([flat] * self.size, [flat.numel()] * self.size)
        return [each.view(x.shape) for each in found]

    def sum_scattered(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of what the members have for this rank.

        Args:
            parts: One for each member, of one shape and dtype.
        """
        own = parts[self.index]
        flat = [part.contiguous().view(-1) for part in parts]
        found = self.swap(flat, [own.numel()] * self.size)
        total = found[0].to(wide_dtype(own.dtype), copy=True)
        for each in found[1:]:
            total += each
        return total.to(own.dtype).view(own.shape)

    def pass_on(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start to send x to the next member, around in a ring; what comes from the one before is
        in the tensor after the wait."""
        coming = torch.empty_like(x, memory_format=torch.contiguous_format)
        after, before = ((self.index + step) % self.size for step in (1, -1))
        pending = self.wire.post(
            [(x.contiguous().view(-1), self.members[after])],
            [(coming.view(-1), self.members[before])],
        )
        return coming, pending
