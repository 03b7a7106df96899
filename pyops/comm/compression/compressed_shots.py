"""Two-shot collectives whose messages are payloads of a codec, over a transport.

x        |  chunk 0  |  chunk 1  |  chunk 2  |      one contiguous chunk per rank, cut into segments
shot 1   rank r encodes its part of every chunk (worker error) and sends each to the chunk's owner
         the owner adds up what arrived, in rank order, and encodes the sum anew (server error)
shot 2   the owner sends its payload to everyone; everyone, the owner too, decodes the same bytes

time      0        1        2        3        4        5        6     DEPTH = 2
segment   encode 0 encode 1 encode 2 encode 3 encode 4 ...
                            sum 0    sum 1    sum 2    ...            while one is computed, others
                                                                      travel
                                              decode 0 decode 1 ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Pending, Transport
from pyops.comm.compression.codec import Codec
from pyops.comm.compression.error_feedback import chunk_starts

__all__ = ["Alone", "Memory", "all_gather", "all_reduce", "reduce_scatter"]

DEPTH = (
    2  # segments between the sending of a message and the first look whether the others' are there
)
AHEAD = 8  # messages whose receives are posted before their turn
LINE = 64  # bytes: payloads begin at multiples of it

Slices = list[tuple[int, int]]


@dataclass(frozen=True)
class Memory:
    """What a collective may write beside its result.

    Attributes:
        seed: Keys rounding at random, another one for each call.
    """

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
    """Memory for payloads, used again from segment to segment: fresh pages cost more than
    encoding."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, sizes: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """(a slab to give back, parts of it of these sizes)"""
        ends = list(itertools.accumulate(-(-size // LINE) * LINE for size in sizes))
        slab = (
            self._free.pop()
            if self._free
            else torch.empty(0, dtype=torch.uint8, device=self._device)
        )
        if slab.numel() < ends[-1]:
            slab = torch.empty(ends[-1], dtype=torch.uint8, device=self._device)
        starts = [0, *ends[:-1]]
        return slab, [slab[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def give(self, slab: Tensor) -> None:
        self._free.append(slab)


class _Exchange:
    """A message to, and one from, every other rank. parts[p]: what rank p sent."""

    def __init__(self, parts: list[Tensor], slab: Tensor, pending: list[Pending]) -> None:
        self.parts, self.slab, self.pending = parts, slab, pending

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()


class _Mail:
    """The messages of one collective: `order` is that in which every rank sends them,
    sizes(message) the bytes from each rank.

    On the CPU, receives are posted AHEAD of their turn: Gloo sends when it is told that somebody
    waits, and it is told so through the very stream in which other data are on their way. On CUDA a
    message's sends and receives are one batch.
    """

    def __init__(
        self,
        transport: Transport,
        order: list[tuple[int, int]],
        sizes: Callable[[int, int], list[int]],
        *,
        device: torch.device,
    ) -> None:
        self._transport, self._sizes = transport, sizes
        self._queue = iter(order)
        self._posted: dict[tuple[int, int], _Exchange] = {}
        # Each rank begins with its right-hand neighbour, so that not all send to rank 0 first.
        self.others = [(transport.rank + i) % transport.size for i in range(1, transport.size)]
        self.slabs = _Slabs(device)
        self._separate = device.type == "cpu"
        for _ in range(AHEAD if self._separate else 0):
            self._receive_next()

    def _receive_next(self) -> None:
        message = next(self._queue, None)
        if message is not None:
            slab, parts = self.slabs.take(self._sizes(*message))
            receives = [(parts[p], p) for p in self.others] if self._separate else []
            self._posted[message] = _Exchange(
                parts, slab, [self._transport.post([], receives)] if receives else []
            )

    def send(self, message: tuple[int, int], payloads: Sequence[Tensor]) -> _Exchange:
        """Send payloads[p] to every other rank p; they must be left alone until the wait."""
        self._receive_next()
        exchange = self._posted.pop(message)
        receives = [] if self._separate else [(exchange.parts[p], p) for p in self.others]
        exchange.pending.append(
            self._transport.post([(payloads[p], p) for p in self.others], receives)
        )
        return exchange


def _order(segments: int, shots: int) -> Iterator[tuple[int, int]]:
    """(stage, segment) in the order of execution: stage j of a segment comes DEPTH segments after
    stage j - 1."""
    for time in range(segments + DEPTH * shots):
        for stage in range(shots):
            if 0 <= time - DEPTH * stage < segments:
                yield stage, time - DEPTH * stage


def _sizes(codec: Codec, slices: Slices) -> list[int]:
    return [codec.payload_bytes(b - a) for a, b in slices]


class _Shots:
    """One collective of `shots` messages a segment, cut as `rounds` says."""

    def __init__(
        self,
        codec: Codec,
        transport: Transport,
        memory: Memory,
        rounds: list[Slices],
        *,
        whole: Tensor,
        gathers: tuple[bool, ...],
    ) -> None:
        self.codec, self.memory, self.rounds = codec, memory, rounds
        self.rank, self.size = transport.rank, transport.size
        self._gathers = gathers
        rank, size = self.rank, self.size

        def message_sizes(
            shot: int, segment: int
        ) -> list[int]:  # no method: its object would keep itself and all slabs alive
            sizes = _sizes(codec, rounds[segment])
            return sizes if gathers[shot] else [sizes[rank]] * size

        self.mail = _Mail(
            transport, list(_order(len(rounds), len(gathers))), message_sizes, device=whole.device
        )
        self.scale = codec.scale_of(whole, memory.worker)
        self._seed = (memory.seed * self.size + self.rank) * 2

    def run(self, steps: Callable[[int], Iterator[_Exchange]]) -> None:
        """Advance the segments' generators, which yield a message at each stage but the last, in
        their turn."""
        waiting: dict[int, tuple[Iterator[_Exchange], _Exchange]] = {}
        for stage, segment in _order(len(self.rounds), len(self._gathers) + 1):
            if stage == 0:
                generator = steps(segment)
            else:
                generator, exchange = waiting.pop(segment)
                exchange.wait()
            sent = next(generator, None)
            if sent is not None:
                waiting[segment] = (generator, sent)

    def encode(self, x: Tensor, at: tuple[int, int], payload: Tensor) -> None:
        a, b = at
        if a < b:
            worker, flag = self.memory.worker_part(a, b), self.memory.flag
            self.codec.encode(
                x[a:b],
                payload,
                error=worker,
                flag=flag,
                scale=self.scale,
                seed=self._seed,
                offset=a,
            )

    def scatter(self, x: Tensor, segment: int) -> Iterator[_Exchange]:
        """Shot 1. After the wait, the message's parts are every rank's payload of this rank's
        slice, this rank's included."""
        slices = self.rounds[segment]
        slab, out = self.mail.slabs.take(_sizes(self.codec, slices))
        for p in self.mail.others:
            self.encode(x, slices[p], out[p])
        exchange = self.mail.send((0, segment), out)
        self.encode(
            x, slices[self.rank], exchange.parts[self.rank]
        )  # while the others' are on their way
        yield exchange
        self.mail.slabs.give(slab)

    def gather(self, out: Tensor, segment: int, *, shot: int, mine: Tensor) -> Iterator[_Exchange]:
        """The last shot: everyone decodes what the owner of each slice has written."""
        slices = self.rounds[segment]
        exchange = self.mail.send((shot, segment), [mine] * self.size)
        self.decode(out, slices[self.rank], mine)
        yield exchange
        for p in self.mail.others:
            self.decode(out, slices[p], exchange.parts[p])
        self.mail.slabs.give(exchange.slab)

    def decode(self, out: Tensor, at: tuple[int, int], payload: Tensor) -> None:
        a, b = at
        if a < b:
            self.codec.decode(payload, out[a:b])

    def reencode(
        self, payload: Tensor, rows: list[Tensor], at: tuple[int, int], *, start: int, scale: float
    ) -> None:
        a, b = at
        if a < b:
            server = self.memory.server_part(a - start, b - start)
            self.codec.reencode(
                payload,
                rows,
                n=b - a,
                scale=scale,
                error=server,
                flag=self.memory.flag,
                seed=self._seed + 1,
                offset=a,
            )


def _rounds(starts: list[int], *, codec: Codec, segment: int) -> list[Slices]:
    """For each round, the piece of every rank's chunk: `segment` elements, or the rest, or
    nothing."""
    longest = max(b - a for a, b in itertools.pairwise(starts))
    step = (
        max(codec.multiple, segment // codec.multiple * codec.multiple)
        if codec.streams
        else max(1, longest)
    )
    return [
        [(min(b, a + begin), min(b, a + begin + step)) for a, b in itertools.pairwise(starts)]
        for begin in range(0, longest, step)
    ]


def all_reduce(
    x: Tensor,
    *,
    codec: Codec,
    transport: Transport,
    segment: int,
    memory: Memory | None = None,
    scale: float = 1.0,
) -> None:
    """x = scale * (sum of x over ranks), as the codec says it, in place.

    Args:
        x: Flat, contiguous.
        segment: Elements of a piece.
    """
    starts = chunk_starts(x.numel(), size=transport.size, multiple=codec.multiple)
    rounds = _rounds(starts, codec=codec, segment=segment)
    shots = _Shots(codec, transport, memory or Memory(), rounds, whole=x, gathers=(False, True))
    rank, slabs = transport.rank, shots.mail.slabs

    def steps(number: int) -> Iterator[_Exchange]:
        slices = rounds[number]
        scattered = shots.scatter(x, number)
        arrived = next(scattered)
        yield arrived
        slab, (mine,) = slabs.take([codec.payload_bytes(slices[rank][1] - slices[rank][0])])
        shots.reencode(mine, arrived.parts, slices[rank], start=starts[rank], scale=scale)
        slabs.give(arrived.slab)
        next(scattered, None)
        yield from shots.gather(x, number, shot=1, mine=mine)
        slabs.give(slab)

    shots.run(steps)


def reduce_scatter(
    x: Tensor,
    out: Tensor,
    *,
    starts: list[int],
    codec: Codec,
    transport: Transport,
    segment: int,
    memory: Memory | None = None,
    scale: float = 1.0,
) -> None:
    """out = scale * (sum over ranks of what each wrote of x[starts[rank]:starts[rank + 1]]), fp32
    inside; x stays as it is."""
    rounds = _rounds(starts, codec=codec, segment=segment)
    shots = _Shots(codec, transport, memory or Memory(), rounds, whole=x, gathers=(False,))

    def steps(number: int) -> Iterator[_Exchange]:
        scattered = shots.scatter(x, number)
        arrived = next(scattered)
        yield arrived
        a, b = (edge - starts[shots.rank] for edge in rounds[number][shots.rank])
        if a < b:
            total = out[a:b] if out.dtype == torch.float32 else torch.empty(b - a, device=x.device)
            codec.sum_rows(total, arrived.parts, scale=scale)
            if out.dtype != torch.float32:
                out[a:b].copy_(total)
        shots.mail.slabs.give(arrived.slab)
        next(scattered, None)

    shots.run(steps)


def all_gather(
    x: Tensor,
    out: Tensor,
    *,
    starts: list[int],
    codec: Codec,
    transport: Transport,
    segment: int,
    memory: Memory | None = None,
) -> None:
    """out[starts[p]:starts[p + 1]] = rank p's x as its payload says it, for every p, this rank
    too."""
    rounds = _rounds(starts, codec=codec, segment=segment)
    shots = _Shots(codec, transport, memory or Memory(), rounds, whole=x, gathers=(True,))
    start = starts[transport.rank]

    def steps(number: int) -> Iterator[_Exchange]:
        a, b = rounds[number][shots.rank]
        slab, (mine,) = shots.mail.slabs.take([codec.payload_bytes(b - a)])
        shots.encode(x, (a - start, b - start), mine)
        yield from shots.gather(out, number, shot=0, mine=mine)
        shots.mail.slabs.give(slab)

    shots.run(steps)
