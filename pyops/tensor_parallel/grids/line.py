"""The ranks of a grid that differ along some of its axes alone, and what they send one another.

    gather            every rank's tensor, on every rank                (n - 1) tensors received
    reduce_scatter    of the sum of n blocks each rank has its own      (n - 1) blocks received
    sum               the sum, on every rank                            2 (n - 1) / n of it received
    exchange          a tensor for another rank's                       1 tensor received

A line is a `Transport` itself, whose ranks are numbered along the axes, the last of them running
fastest. Sums are in the order of these numbers, in fp32 for 16 bits, and rounded once: the bits are
the same on every rank and in every run. What comes in is counted, see `Traffic`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import sum_rows
from pyops.comm.collectives.transport import Messages, Pending, Transport

__all__ = ["Line", "Reduction", "Traffic", "joined"]


@dataclass
class Traffic:
    """What a rank has received over the lines of its grid."""

    bytes_received: int = 0
    """Bytes of all messages."""
    messages: int = 0
    """How many there were."""
    collectives: int = 0
    """How many gathers, sums and the like they belonged to: what latency counts."""
    by_axes: dict[tuple[str, ...], int] = field(default_factory=dict)
    """Bytes received over the line of each axis, or of several."""

    def clear(self) -> None:
        """Begin to count anew."""
        self.bytes_received = self.messages = self.collectives = 0
        self.by_axes.clear()


class Nothing:
    """What a rank alone waits for."""

    def wait(self) -> None:
        """Return at once."""


@dataclass
class Reduction:
    """A sum over the ranks of a line that one of them gets."""

    rows: list[Tensor]
    """The ranks' tensors, flat, in rank order; empty on the others."""
    shape: torch.Size
    """Of the result."""
    pending: Pending
    """What to wait for."""

    def result(self) -> Tensor | None:
        """The sum, on the rank that gets it, and None on the others."""
        self.pending.wait()
        if not self.rows:
            return None
        if len(self.rows) == 1:
            return self.rows[0].view(self.shape)
        total = torch.empty_like(self.rows[0])
        sum_rows(total, self.rows)
        return total.view(self.shape)


class Line:
    """Ranks along some axes of a grid.

    Args:
        transport: Over all ranks of the grid; None for one rank.
        members: The line's ranks, numbered as in the transport.
        axes: What they differ in.
        traffic: Where messages are counted.
    """

    def __init__(
        self,
        transport: Transport | None,
        members: Sequence[int],
        axes: tuple[str, ...],
        traffic: Traffic,
    ) -> None:
        self._transport, self._members = transport, tuple(members)
        self.axes, self.traffic = axes, traffic
        self.size = len(self._members)
        self.rank = 0 if transport is None else self._members.index(transport.rank)

    def post(self, sends: Messages, receives: Messages) -> Pending:
        """As of `Transport`, with peers numbered along the line."""
        if self._transport is None:
            raise RuntimeError("one rank alone has nobody to send to")
        coming = [t.numel() * t.element_size() for t, _ in receives if t.numel()]
        traffic = self.traffic
        traffic.bytes_received += sum(coming)
        traffic.messages += len(coming)
        traffic.by_axes[self.axes] = traffic.by_axes.get(self.axes, 0) + sum(coming)
        return self._transport.post(
            [(t, self._members[peer]) for t, peer in sends],
            [(t, self._members[peer]) for t, peer in receives],
        )

    @property
    def others(self) -> list[int]:
        """The other ranks, from the right-hand neighbor on, so that not all send to one first."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """([n, *x.shape] in the order of the line, what to wait for before it is read)."""
        if self.size == 1:
            return x[None], Nothing()
        self.traffic.collectives += 1
        rows = x.new_empty(self.size, *x.shape)
        rows[self.rank] = x
        mine = rows[self.rank].view(-1)
        pending = self.post(
            [(mine, p) for p in self.others], [(rows[p].view(-1), p) for p in self.others]
        )
        return rows, pending

    def gather(self, x: Tensor, *, dim: int) -> Tensor:
        """The ranks' tensors one after the other along `dim`."""
        if self.size == 1:
            return x
        rows, pending = self.start_gather(x)
        pending.wait()
        return joined(rows, dim)

    def reduce_scatter(self, x: Tensor, *, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """This rank's of equal parts along `dim` of the ranks' sum.

        Args:
            x: Of one shape on every rank; `dim` a multiple of the ranks.
            dim: Which dimension is cut.
            dtype: Of the result, to which the sum is rounded; None: x's.
        """
        if self.size == 1:
            return x if dtype is None else x.to(dtype)
        parts = [part.contiguous() for part in x.tensor_split(self.size, dim)]
        shape = parts[0].shape
        coming = x.new_empty(self.size, parts[0].numel())
        rows = [parts[p].view(-1) if p == self.rank else coming[p] for p in range(self.size)]
        self.traffic.collectives += 1
        self.post(
            [(parts[p].view(-1), p) for p in self.others], [(rows[p], p) for p in self.others]
        ).wait()
        total = x.new_empty(parts[0].numel())
        sum_rows(total, rows)
        return total.view(shape).to(dtype or x.dtype)

    def sum(self, x: Tensor) -> Tensor:
        """The ranks' sum, a new tensor with the same bits on every rank."""
        if self.size == 1:
            return x
        flat = x.reshape(-1)
        missing = -flat.numel() % self.size
        if missing:
            flat = torch.nn.functional.pad(flat, (0, missing))
        whole = self.gather(self.reduce_scatter(flat, dim=0), dim=0)
        return whole[: x.numel()].view(x.shape)

    def start_broadcast(self, x: Tensor, root: int) -> tuple[Tensor, Pending]:
        """(the tensor of the rank `root`, what to wait for before it is read); x: of its shape."""
        if self.size == 1:
            return x, Nothing()
        self.traffic.collectives += 1
        if self.rank == root:
            x = x.contiguous()
            return x, self.post([(x.view(-1), p) for p in self.others], [])
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        return found, self.post([], [(found.view(-1), root)])

    def start_reduce(self, x: Tensor, root: int) -> Reduction:
        """Send x to the rank `root`, which adds up the ranks' in their order."""
        x = x.contiguous()
        if self.size == 1:
            return Reduction([x.view(-1)], x.shape, Nothing())
        self.traffic.collectives += 1
        if self.rank != root:
            return Reduction([], x.shape, self.post([(x.view(-1), root)], []))
        rows = [x.view(-1) if p == root else torch.empty_like(x).view(-1) for p in range(self.size)]
        return Reduction(rows, x.shape, self.post([], [(rows[p], p) for p in self.others]))

    def exchange(self, x: Tensor, peer: int) -> Tensor:
        """The tensor of the rank `peer`, which is given x for it."""
        if peer == self.rank:
            return x
        x, found = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        self.traffic.collectives += 1
        self.post([(x.view(-1), peer)], [(found.view(-1), peer)]).wait()
        return found


def joined(rows: Tensor, dim: int) -> Tensor:
    """[n, ...] as one tensor with the n parts after one another along `dim` of the rest."""
    if dim == 0:
        return rows.flatten(0, 1)
    return torch.cat(list(rows), dim)
