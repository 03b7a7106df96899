"""Two-shot collectives whose messages are payloads of a codec, over a transport.

x         |  chunk 0  |  chunk 1  |  chunk 2  |      one contiguous chunk per rank, cut into segments
shot 1    rank r encodes its part of every chunk (worker error) and sends each to the chunk's owner
          the owner adds up what arrived, in rank order, and encodes the sum anew (server error)
shot 2    the owner sends its payload to everyone; everyone, the owner too, decodes the same bytes

segment 0   encode | post ......... reencode | post ........ decode
segment 1            encode | post .........   reencode | post ........ decode
segment 2                     encode | post .........     ...                      computing while others travel
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.codec import Codec
from pyops.comm.error_feedback import chunk_starts
from pyops.comm.transport import Pending, Transport, run_staggered

__all__ = ["Alone", "Memory", "all_gather", "all_reduce", "reduce_scatter"]

WINDOW = 3  # segments on their way at once
LINE = 64  # bytes: payloads begin at multiples of it

Slices = list[tuple[int, int]]


@dataclass(frozen=True)
class Memory:
    """What a collective may write beside its result. seed: keys rounding at random, another one for each call."""

    worker: Tensor | None = None
    server: Tensor | None = None
    flag: Tensor | None = None
    seed: int = 0

    def worker_part(self, a: int, b: int) -> Tensor | None:
        return None if self.worker is None else self.worker[a:b]

    def server_part(self, a: int, b: int) -> Tensor | None:
        return None if self.server is None else self.server[a:b]


class _Done:
    def wait(self) -> None:
        return None


class Alone:
    """The transport of a rank that has no others."""

    rank, size = 0, 1

    def post(self, sends: object, receives: object) -> Pending:
        return _Done()


class _Slabs:
    """Memory for payloads, used again from segment to segment: fresh pages cost more than encoding."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """(a slab to give back, parts of it of these sizes)"""
        ends = list(itertools.accumulate(-(-size // LINE) * LINE for size in sizes))
        slab = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8, device=self._device)
        if slab.numel() < ends[-1]:
            slab = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        starts = [0, *ends[:-1]]
        return slab, [slab[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def give(self, slab: Tensor) -> None:
        self._free.append(slab)


class _Shots:
    """One collective: what its segments share."""

    def __init__(self, codec: Codec, transport: Transport, memory: Memory, *, whole: Tensor, device: torch.device) -> None:
        self.codec, self.transport, self.memory = codec, transport, memory
        self.slabs = _Slabs(device)
        self.rank, self.size = transport.rank, transport.size
        # Each rank begins with its right-hand neighbour, so that not all send to rank 0 first.
        self.others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.scale = codec.scale_of(whole, memory.worker)
        self._seed = (memory.seed * self.size + self.rank) * 2

    def encode(self, x: Tensor, at: tuple[int, int], payload: Tensor) -> None:
        a, b = at
        if a < b:
            worker, flag = self.memory.worker_part(a, b), self.memory.flag
            self.codec.encode(x[a:b], payload, error=worker, flag=flag, scale=self.scale, seed=self._seed, offset=a)

    def scatter(self, x: Tensor, slices: Slices) -> Iterator[Pending | tuple[list[Tensor], Tensor]]:
        """Shot 1: yields what to wait for, then (every rank's payload of this rank's slice, the slab they lie in)."""
        sizes = [self.codec.payload_bytes(b - a) for a, b in slices]
        mine = sizes[self.rank]
        slab, parts = self.slabs.take([*sizes, *[mine] * self.size])
        out, rows = parts[: self.size], parts[self.size :]
        rows[self.rank] = out[self.rank]
        for p in self.others:
            self.encode(x, slices[p], out[p])
        pending = self.transport.post([(out[p], p) for p in self.others], [(rows[p], p) for p in self.others])
        self.encode(x, slices[self.rank], out[self.rank])  # while the others' are on their way
        yield pending
        yield rows, slab

    def gather(self, out: Tensor, slices: Slices, mine: Tensor, parts: list[Tensor]) -> Iterator[Pending]:
        """Shot 2: everyone decodes what the owner of each slice has written; `parts[p]` is where it arrives."""
        pending = self.transport.post([(mine, p) for p in self.others], [(parts[p], p) for p in self.others])
        self.decode(out, slices[self.rank], mine)
        yield pending
        for p in self.others:
            self.decode(out, slices[p], parts[p])

    def decode(self, out: Tensor, at: tuple[int, int], payload: Tensor) -> None:
        a, b = at
        if a < b:
            self.codec.decode(payload, out[a:b])

    def reencode(self, payload: Tensor, rows: list[Tensor], at: tuple[int, int], *, start: int, scale: float) -> None:
        a, b = at
        if a < b:
            server = self.memory.server_part(a - start, b - start)
            self.codec.reencode(
                payload, rows, n=b - a, scale=scale, error=server, flag=self.memory.flag, seed=self._seed + 1, offset=a
            )


def _rounds(starts: list[int], *, codec: Codec, segment: int) -> list[Slices]:
    """For each round, the piece of every rank's chunk: `segment` elements, or the rest, or nothing."""
    longest = max(b - a for a, b in itertools.pairwise(starts))
    step = max(codec.multiple, segment // codec.multiple * codec.multiple) if codec.streams else max(1, longest)
    return [
        [(min(b, a + begin), min(b, a + begin + step)) for a, b in itertools.pairwise(starts)]
        for begin in range(0, longest, step)
    ]


def all_reduce(
    x: Tensor, *, codec: Codec, transport: Transport, segment: int, memory: Memory | None = None, scale: float = 1.0
) -> None:
    """x = scale * (sum of x over ranks), as the codec says it, in place. x: flat, contiguous. segment: elements of a piece."""
    shots = _Shots(codec, transport, memory or Memory(), whole=x, device=x.device)
    starts = chunk_starts(x.numel(), size=transport.size, multiple=codec.multiple)

    def steps(slices: Slices) -> Iterator[Pending]:
        scattered = shots.scatter(x, slices)
        yield next(scattered)  # type: ignore[misc]
        rows, slab = next(scattered)  # type: ignore[misc]
        own, parts = shots.slabs.take([codec.payload_bytes(b - a) for a, b in slices])
        mine = parts[shots.rank]
        shots.reencode(mine, rows, slices[shots.rank], start=starts[shots.rank], scale=scale)
        shots.slabs.give(slab)
        yield from shots.gather(x, slices, mine, parts)
        shots.slabs.give(own)

    run_staggered((steps(slices) for slices in _rounds(starts, codec=codec, segment=segment)), window=WINDOW)


def reduce_scatter(
    x: Tensor, out: Tensor, *, starts: list[int], codec: Codec, transport: Transport, segment: int,
    memory: Memory | None = None, scale: float = 1.0,
) -> None:  # fmt: skip
    """out = scale * (sum over ranks of what each wrote of x[starts[rank]:starts[rank + 1]]), fp32 inside; x stays as it is."""
    shots = _Shots(codec, transport, memory or Memory(), whole=x, device=x.device)

    def steps(slices: Slices) -> Iterator[Pending]:
        scattered = shots.scatter(x, slices)
        yield next(scattered)  # type: ignore[misc]
        rows, slab = next(scattered)  # type: ignore[misc]
        a, b = (edge - starts[shots.rank] for edge in slices[shots.rank])
        if a < b:
            total = out[a:b] if out.dtype == torch.float32 else torch.empty(b - a, device=x.device)
            codec.sum_rows(total, rows, scale=scale)
            if out.dtype != torch.float32:
                out[a:b].copy_(total)
        shots.slabs.give(slab)

    run_staggered((steps(slices) for slices in _rounds(starts, codec=codec, segment=segment)), window=WINDOW)


def all_gather(
    x: Tensor, out: Tensor, *, starts: list[int], codec: Codec, transport: Transport, segment: int, memory: Memory | None = None
) -> None:
    """out[starts[p]:starts[p + 1]] = rank p's x as its payload says it, for every p, this rank too."""
    shots = _Shots(codec, transport, memory or Memory(), whole=x, device=x.device)
    start = starts[transport.rank]

    def steps(slices: Slices) -> Iterator[Pending]:
        slab, parts = shots.slabs.take([codec.payload_bytes(b - a) for a, b in slices])
        a, b = slices[shots.rank]
        shots.encode(x, (a - start, b - start), parts[shots.rank])
        yield from shots.gather(out, slices, parts[shots.rank], parts)
        shots.slabs.give(slab)

    run_staggered((steps(slices) for slices in _rounds(starts, codec=codec, segment=segment)), window=WINDOW)
