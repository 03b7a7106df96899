"""Ring collectives: each rank talks to its neighbours only, and every link carries 2 (n - 1) / n of
the tensor.

    owner o of a piece, n = 4:   o+1 --raw--> o+2 --sum--> o+3 --sum--> o
                                 o adds its own, scales, rounds once
                                 then o --result--> o+1 --> o+2 --> o+3

The order of summation of an element is o+1, o+2, ..., o, and o depends only on its absolute
position: pieces are cut at multiples of the segment length in the buffer, of which the tensor is
the part that begins at `offset`; piece j belongs to rank j % n. So the result does not depend on
how a buffer is cut into buckets. 16-bit values are shipped raw on the first hop and as fp32 partial
sums afterwards.

n consecutive pieces, one per owner, make a round; several rounds are on their way at once, so that
one is summed while the next one travels. Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms", 2009; as segmented in Gloo's allreduce_ring_chunked.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import accumulate, partial_dtype, scale_in_place
from pyops.comm.collectives.transport import Pending, Transport, run_staggered

__all__ = ["all_gather", "all_reduce", "pieces_of", "reduce_scatter"]

WINDOW = 6  # rounds on their way at once
AHEAD = 32  # pieces that a ring of two receives ahead
Round = list[
    tuple[int, int]
]  # by owner: [start, stop) within the tensor; equal numbers where there is nothing


def pieces_of(numel: int, *, size: int, segment: int, offset: int = 0) -> list[Round]:
    """The rounds of a tensor that begins at `offset` of its buffer: cut at multiples of `segment`
    in the buffer."""
    rounds: dict[int, Round] = {}
    start = 0
    while start < numel:
        number = (offset + start) // segment
        stop = min(numel, (number + 1) * segment - offset)
        rounds.setdefault(number // size, [(0, 0)] * size)[number % size] = (start, stop)
        start = stop
    return list(rounds.values())


def shards_of(starts: list[int], *, segment: int) -> list[Round]:
    """The rounds in which rank p owns [starts[p], starts[p + 1])."""
    longest = max(b - a for a, b in itertools.pairwise(starts))
    return [
        [(min(a + k, b), min(a + k + segment, b)) for a, b in itertools.pairwise(starts)]
        for k in range(0, longest, segment)
    ]


class _Scratch:
    """Receive buffers that are used again, because fresh ones of this size cost a page fault every
    4 KiB."""

    def __init__(self, x: Tensor, *, segment: int) -> None:
        self._device, self._segment = x.device, min(segment, x.numel())
        self._free: dict[torch.dtype, list[Tensor]] = {}

    def take(self, dtype: torch.dtype) -> Tensor:
        free = self._free.setdefault(dtype, [])
        return free.pop() if free else torch.empty(self._segment, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        self._free[buffer.dtype].append(buffer)


def _reduce(
    x: Tensor,
    out: Tensor,
    pieces: Round,
    *,
    out_start: int,
    transport: Transport,
    scale: float,
    scratch: _Scratch,
) -> Iterator[Pending]:
    """Sum the pieces; the one that this rank owns ends up in `out`, which begins at element
    `out_start` of x."""
    rank, size = transport.rank, transport.size
    carried = x[slice(*pieces[(rank - 1) % size])]
    lent: Tensor | None = None  # the buffer of `carried`, once that is a partial sum
    for hop in range(size - 1):
        owner = (rank - 2 - hop) % size
        own = x[slice(*pieces[owner])]
        buffer = scratch.take(x.dtype if hop == 0 else partial_dtype(x.dtype))
        arrived = buffer[: own.numel()]
        yield transport.post([(carried, (rank + 1) % size)], [(arrived, (rank - 1) % size)])
        if lent is not None:
            scratch.give(lent)
        if owner == rank:
            start = pieces[owner][0] - out_start
            target = out[start : start + own.numel()]
            if target.data_ptr() != own.data_ptr():
                target.copy_(own)
            accumulate(target, arrived, scale=scale)
            scratch.give(buffer)
            continue
        if arrived.dtype == partial_dtype(x.dtype):
            lent, carried = buffer, arrived
        else:
            lent = scratch.take(partial_dtype(x.dtype))
            carried = lent[: own.numel()]
            carried.copy_(arrived)
            scratch.give(buffer)
        accumulate(carried, own)


def _gather(x: Tensor, pieces: Round, *, transport: Transport) -> Iterator[Pending]:
    """Pass each owner's piece once around."""
    rank, size = transport.rank, transport.size
    for hop in range(size - 1):
        ours, theirs = pieces[(rank - hop) % size], pieces[(rank - 1 - hop) % size]
        yield transport.post(
            [(x[slice(*ours)], (rank + 1) % size)], [(x[slice(*theirs)], (rank - 1) % size)]
        )


def _swap(x: Tensor, *, transport: Transport, segment: int, scale: float) -> None:
    """A ring of two on the CPU: both send everything and sum for themselves.

    As many bytes as by way of owners, and a + b has the same bits as b + a.

    Receives are posted well ahead of the sends: Gloo sends when it is told that somebody waits, and
    it is told so through the very stream in which the other's data are on their way.
    """
    peer = 1 - transport.rank
    pieces = x.split(segment)
    scratch = _Scratch(x, segment=segment)
    receives: deque[tuple[Tensor, Pending]] = deque()
    waiting: deque[tuple[Tensor, Pending]] = deque()

    def finish() -> None:
        (piece, sent), (buffer, received) = waiting.popleft(), receives.popleft()
        received.wait()
        sent.wait()
        accumulate(piece, buffer[: piece.numel()], scale=scale)
        scratch.give(buffer)

    posted = 0
    for number, piece in enumerate(pieces):
        while posted < min(len(pieces), number + AHEAD):
            buffer = scratch.take(x.dtype)
            receives.append(
                (buffer, transport.post([], [(buffer[: pieces[posted].numel()], peer)]))
            )
            posted += 1
        waiting.append((piece, transport.post([(piece, peer)], [])))
        if len(waiting) == AHEAD:
            finish()
    while waiting:
        finish()


def all_reduce(
    x: Tensor, *, transport: Transport, segment: int, scale: float = 1.0, offset: int = 0
) -> None:
    """x = scale * (sum of x over ranks), in place.

    Args:
        x: Flat, contiguous, of one size on all ranks.
        segment, offset: Elements.
    """
    if transport.size == 1:
        scale_in_place(x, scale=scale)
        return
    if transport.size == 2 and not x.is_cuda:
        _swap(x, transport=transport, segment=segment, scale=scale)
        return
    scratch = _Scratch(x, segment=segment)

    def steps(pieces: Round) -> Iterator[Pending]:
        yield from _reduce(
            x, x, pieces, out_start=0, transport=transport, scale=scale, scratch=scratch
        )
        yield from _gather(x, pieces, transport=transport)

    rounds = pieces_of(x.numel(), size=transport.size, segment=segment, offset=offset)
    run_staggered((steps(pieces) for pieces in rounds), window=WINDOW)


def reduce_scatter(
    x: Tensor,
    out: Tensor,
    *,
    starts: list[int],
    transport: Transport,
    segment: int,
    scale: float = 1.0,
) -> None:
    """out = scale * (sum over ranks of x[starts[rank]:starts[rank + 1]]).

    Args:
        x, out: Flat, contiguous; x is left as it is.
    """
    mine = starts[transport.rank]
    if transport.size == 1:
        out.copy_(x)
        scale_in_place(out, scale=scale)
        return
    scratch = _Scratch(x, segment=segment)
    steps = (
        _reduce(x, out, pieces, out_start=mine, transport=transport, scale=scale, scratch=scratch)
        for pieces in shards_of(starts, segment=segment)
    )
    run_staggered(steps, window=WINDOW)


def all_gather(
    x: Tensor, out: Tensor, *, starts: list[int], transport: Transport, segment: int
) -> None:
    """out[starts[p]:starts[p + 1]] = rank p's x, for every p. Any dtype: nothing is computed."""
    out[starts[transport.rank] : starts[transport.rank + 1]].copy_(x)
    steps = (
        _gather(out, pieces, transport=transport) for pieces in shards_of(starts, segment=segment)
    )
    run_staggered(steps, window=WINDOW)
