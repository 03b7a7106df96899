"""Two-shot collectives: slices to their owners, a local sum in rank order, and the results back to
all.

    shot 1   rank r sends slice p of its tensor to rank p, for every p     (n - 1) / n of the tensor
             rank p sums the n slices in the order of the ranks, fp32 inside, rounds once
    shot 2   rank p sends its result to everyone                           (n - 1) / n of the tensor

Each element is summed in rank order, so the result is that of one sum_rows over the ranks' tensors,
bit for bit, wherever it is cut. Only two latencies whatever n. 16-bit values travel raw and yet are
rounded once only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from pyops.comm.collectives.arithmetic import scale_in_place, sum_rows
from pyops.comm.collectives.ring import shards_of
from pyops.comm.collectives.transport import Pending, Transport, run_staggered

__all__ = ["all_gather", "all_reduce", "reduce_scatter", "sum_of_whole"]

WINDOW = 3  # chunks on their way at once
LINE = 64  # elements: slices begin at multiples of it


def _slices(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    each = -(-(stop - start) // size)
    each = -(-each // LINE) * LINE
    cuts = [min(stop, start + each * p) for p in range(size + 1)]
    return list(itertools.pairwise(cuts))


def _others(transport: Transport) -> list[int]:
    # Each rank begins with its right-hand neighbour, so that not all send to rank 0 first.
    return [(transport.rank + i) % transport.size for i in range(1, transport.size)]


def _reduce(
    x: Tensor,
    out: Tensor,
    slices: list[tuple[int, int]],
    *,
    out_start: int,
    transport: Transport,
    scale: float,
) -> Iterator[Pending]:
    a, b = slices[transport.rank]
    others = _others(transport)
    block = torch.empty(transport.size, b - a, dtype=x.dtype, device=x.device)
    rows = [x[a:b] if p == transport.rank else block[p] for p in range(transport.size)]
    yield transport.post(
        [(x[slice(*slices[p])], p) for p in others], [(rows[p], p) for p in others]
    )
    sum_rows(out[a - out_start : b - out_start], rows, scale=scale)


def _gather(x: Tensor, slices: list[tuple[int, int]], *, transport: Transport) -> Iterator[Pending]:
    others = _others(transport)
    mine = x[slice(*slices[transport.rank])]
    yield transport.post([(mine, p) for p in others], [(x[slice(*slices[p])], p) for p in others])


def all_reduce(x: Tensor, *, transport: Transport, segment: int, scale: float = 1.0) -> None:
    """x = scale * (sum of x over ranks), in place.

    Args:
        x: Flat, contiguous, of one size everywhere.
        segment: Elements per slice.
    """
    if transport.size == 1:
        scale_in_place(x, scale=scale)
        return

    def steps(start: int, stop: int) -> Iterator[Pending]:
        slices = _slices(start, stop, transport.size)
        yield from _reduce(x, x, slices, out_start=0, transport=transport, scale=scale)
        yield from _gather(x, slices, transport=transport)

    chunk = segment * transport.size
    cuts = range(0, x.numel(), chunk)
    run_staggered((steps(start, min(x.numel(), start + chunk)) for start in cuts), window=WINDOW)


def sum_of_whole(x: Tensor, *, transport: Transport, segment: int, scale: float = 1.0) -> None:
    """`all_reduce` in one shot, with the same bits: each rank sends all it has to all others and
    adds in the order of ranks.

    Two ranks send as many bytes as in two shots; for more it pays where the message is small.
    """
    others = _others(transport)

    def steps(part: Tensor) -> Iterator[Pending]:
        block = torch.empty(transport.size, part.numel(), dtype=x.dtype, device=x.device)
        rows = [part if p == transport.rank else block[p] for p in range(transport.size)]
        yield transport.post([(part, p) for p in others], [(rows[p], p) for p in others])
        sum_rows(part, rows, scale=scale)

    if transport.size == 1:
        scale_in_place(x, scale=scale)
    else:
        run_staggered((steps(part) for part in x.split(segment)), window=WINDOW)


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
    if transport.size == 1:
        out.copy_(x)
        scale_in_place(out, scale=scale)
        return
    steps = (
        _reduce(x, out, pieces, out_start=starts[transport.rank], transport=transport, scale=scale)
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
