"""VirtualTime: replicas, shards and links in one process, on a clock that jumps from event to
event.

    worker 0   |compute|push--->      |compute|push--->
    shard                  apply |fetch|          apply |fetch|
    worker 1   |   compute      |push-->...
               0       1       2       3        seconds of virtual time

Clients and shards are those of a real run: only what carries their messages is another. Gradients
are computed for real; how long that takes, and how long messages travel, is told.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import FlatBuffer
from pyops.parameter_server.client import Client
from pyops.parameter_server.config import DownpourConfig, ShardConfig
from pyops.parameter_server.endpoint import Endpoint
from pyops.parameter_server.messages import HEADER_BYTES, Fetched, Kind, Request, message
from pyops.parameter_server.shard import MakeOptimizer, ParameterShard
from pyops.parameter_server.vectors import check_model, cut, named_parameters

__all__ = ["Clock", "VirtualTime", "VirtualWorker"]


class Clock:
    """Events in order of time; of one time, in the order in which they were planned.

    Attributes:
        now: Seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Plan a call."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float = float("inf")) -> None:
        """Call what is planned, up to a time."""
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        if until < float("inf"):
            self.now = max(self.now, until)


@dataclass(frozen=True)
class VirtualWorker:
    """A replica of virtual time.

    Attributes:
        seconds: Of each step: a number, or a function of the step's number.
        latency: Seconds of a message, each way.
        bandwidth: Bytes per second of the worker's link; inf: as much as wanted.
        starts: When it joins, in seconds.
        dies: When it is lost, in seconds; None: never.
        steps: How many it makes before it leaves; None: as many as time allows.
    """

    seconds: float | Callable[[int], float] = 1.0
    latency: float = 0.0
    bandwidth: float = float("inf")
    starts: float = 0.0
    dies: float | None = None
    steps: int | None = None


class _Pending:
    """An exchange of virtual time."""

    def __init__(self) -> None:
        self._value: Any = None
        self._done = False
        self.waiting: Callable[[], None] | None = None

    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if not self._done:
            raise RuntimeError("the exchange is still travelling; run the clock first")
        return self._value

    def arrive(self, value: Any) -> None:
        self._value, self._done = value, True
        if self.waiting is not None:
            call, self.waiting = self.waiting, None
            call()


class _VirtualLinks:
    """One worker's links: messages queue for its link, one after the other."""

    def __init__(self, run: VirtualTime, worker: VirtualWorker, number: int) -> None:
        self._run, self._worker, self._number = run, worker, number
        self._free = 0.0
        self.alive = True
        config = run.config
        self._ends = [
            Endpoint(s, push_codec=config.push_codec, fetch_codec=config.fetch_codec)
            for s in run.shards
        ]
        self.bytes = 0

    @property
    def starts(self) -> Sequence[int]:
        return self._run.starts

    @property
    def gradients(self) -> Sequence[Tensor]:
        return ()

    def check(self, shard: int, request: Request) -> None:
        raise NotImplementedError("links without gradients have nothing to check")

    def _travel(self, num_bytes: int) -> float:
        """Seconds until a message that is sent now is there."""
        clock = self._run.clock
        begin = max(clock.now, self._free)
        self._free = begin + num_bytes / self._worker.bandwidth
        self.bytes += num_bytes
        return self._free + self._worker.latency - clock.now

    def _ask(
        self, shard: int, request: Request, size: int, serve: Callable[[Request], Any]
    ) -> _Pending:
        pending = _Pending()
        request = replace(request, epoch=self._run.shards[shard].epoch)

        def answer() -> None:
            reply, reply_bytes = serve(request)

            def back() -> None:
                if self.alive:
                    pending.arrive(reply)

            self._run.clock.after(self._travel(reply_bytes), back)

        self._run.clock.after(
            self._travel(size), lambda: self._run._deliver(shard, request, answer, self)
        )
        return pending

    def message(self, shard: int, payload_bytes: int) -> Tensor:
        return message(payload_bytes)

    def push(self, shard: int, request: Request, whole: Tensor | None) -> _Pending:
        assert whole is not None  # there are no gradients to read elsewhere

        def serve(request: Request) -> tuple[Tensor, int]:
            self._ends[shard].read_push(request, whole)
            return self._ends[shard].push(request), HEADER_BYTES

        return self._ask(shard, request, len(whole), serve)

    def fetch(self, shard: int, request: Request, reply_bytes: Callable[[bool], int]) -> _Pending:
        def serve(request: Request) -> tuple[Fetched, int]:
            answer = self._ends[shard].fetch(request)
            return Fetched(answer, whole=bool(request.whole)), len(answer)

        return self._ask(shard, request, HEADER_BYTES, serve)

    def close(self, *, lost: bool = False) -> None:
        self.alive = False
        for shard in self._run.shards:
            shard.leave(self._number, 1, lost=lost)
        self._run._wake()


class VirtualTime:
    """A run of Downpour SGD in virtual time.

    Args:
        model: A replica's model; each worker has a copy of it.
        gradient: (model, worker, step) -> None: forward and backward of the worker's minibatch.
        optimizer: As of ParameterShard.
        workers: The replicas, numbered in this order.
        shards: How many shards the parameters are cut into.
        config: The replicas'.
        shard_config: The shards'; for a replay of several shards, one for each.

    Attributes:
        clock: Whose `now` is the time, in seconds.
        layout: Where each parameter lies in `parameters()`.
        shards: The shards.
        clients: The replicas that have joined, by number.

    Raises:
        ValueError: For a model that shards can't hold, or no workers.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        gradient: Callable[[nn.Module, int, int], None],
        optimizer: MakeOptimizer,
        workers: Sequence[VirtualWorker],
        *,
        shards: int = 1,
        config: DownpourConfig | None = None,
        shard_config: ShardConfig | Sequence[ShardConfig] | None = None,
    ) -> None:
        if not workers:
            raise ValueError("there are no workers; give one VirtualWorker or more")
        self._make_model, self._gradient, self.workers = model, gradient, workers
        self.config, self.clock = config or DownpourConfig(), Clock()
        first = model()
        codecs = (self.config.push_codec, self.config.fetch_codec)
        check_model(first, buffers=self.config.buffers, codecs=any(codecs))
        self.layout = FlatBuffer.layout_of(named_parameters(first))
        self.starts = cut(first, shards=shards)
        configs = (
            list(shard_config) if isinstance(shard_config, Sequence) else [shard_config] * shards
        )
        dtype = named_parameters(first)[0][1].dtype
        self.shards = [
            ParameterShard(b - a, optimizer, config=each, dtype=dtype)
            for (a, b), each in zip(pairwise(self.starts), configs, strict=True)
        ]
        self.clients: dict[int, Client] = {}
        self._parked: list[tuple[int, Request, Callable[[], None], _VirtualLinks]] = []
        for number, worker in enumerate(workers):
            self.clock.after(worker.starts, lambda n=number, w=worker: self._join(n, w))  # type: ignore[misc]

    # messages

    def _deliver(
        self, shard: int, request: Request, answer: Callable[[], None], links: _VirtualLinks
    ) -> None:
        """A message is at its shard; it is answered once it is its turn."""
        self._parked.append((shard, request, answer, links))
        self._wake()

    def _wake(self) -> None:
        """Answer what may be answered now, in order of arrival."""
        index = 0
        while index < len(self._parked):
            shard, request, answer, links = self._parked[index]
            if not links.alive and request.kind == Kind.FETCH:
                del self._parked[index]
            elif self.shards[shard].ready(request):
                del self._parked[index]
                answer()
                index = 0
            else:
                index += 1

    # workers

    def _join(self, number: int, worker: VirtualWorker) -> None:
        links = _VirtualLinks(self, worker, number)
        client = Client(self._make_model(), links, config=self.config, worker=number)
        self.clients[number] = client
        for shard, (a, b) in zip(self.shards, pairwise(self.starts), strict=True):
            shard.join(number, 1)
            shard.initialize(client.buffer.data[a:b])
        if worker.dies is not None:
            self.clock.after(max(0.0, worker.dies - self.clock.now), lambda: self._lose(links))
        self._go(self._life(client, number, worker), links)
        self._wake()

    def _lose(self, links: _VirtualLinks) -> None:
        if links.alive:
            links.close(lost=True)

    def _life(
        self, client: Client, number: int, worker: VirtualWorker
    ) -> Iterator[float | _Pending]:
        yield from client.first_fetch()  # type: ignore[misc]
        while worker.steps is None or client.step_number < worker.steps:
            step = client.step_number
            yield worker.seconds(step) if callable(worker.seconds) else worker.seconds
            with torch.enable_grad():
                self._gradient(self.model_of(number), number, step)
            yield from client.exchange()  # type: ignore[misc]
        yield from client.flush()  # type: ignore[misc]
        client.links.close()

    def _go(self, life: Iterator[float | _Pending], links: _VirtualLinks) -> None:
        """Live until there is something to wait for."""
        if not links.alive:
            return
        for awaited in life:
            if isinstance(awaited, _Pending):
                if awaited.done():
                    continue
                awaited.waiting = lambda: self._go(life, links)
            else:
                self.clock.after(awaited, lambda: self._go(life, links))
            return

    def model_of(self, worker: int) -> nn.Module:
        """A worker's model."""
        return self.clients[worker].model

    def run(self, seconds: float = float("inf")) -> VirtualTime:
        """Let time pass, up to `seconds` on the clock; returns the run."""
        self.clock.run(seconds)
        return self

    def parameters(self) -> Tensor:
        """The shards' parameters, one after the other: [numel]."""
        return torch.cat([shard.parameter.detach() for shard in self.shards])
