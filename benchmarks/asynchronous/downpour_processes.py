"""Downpour SGD between real processes, for bench downpour: how long a push and a fetch take, what a
slow replica and a killed one cost the others, and what codecs save on a slow link.

    store      in the process of the bench
    shard      a process that calls `serve`
    replicas   processes that call `connect`; a step of theirs sleeps, so that cores are no limit
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc

from pyops.comm import Int8
from pyops.optim import SGD
from pyops.parameter_server import DownpourConfig, ShardConfig, connect, serve, stop

__all__ = ["exchanges", "killed", "over_link", "uneven"]

HOST, LINK_PORT, SHARD = "127.0.0.1", 29600, "shard"
TIMEOUT = 120.0


class Vector(nn.Module):
    """So many parameters. Their gradient is 0 at every step: only its way is measured."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(numel))


def _store(port: int, *, host: str = HOST, serves: bool = False) -> dist.TCPStore:
    return dist.TCPStore(host, port, is_master=serves, wait_for_workers=False)


def _shard(port: int, config: ShardConfig, numel: int, rpc_port: int) -> None:
    """A shard's process; with `numel` it also holds so many numbers for torch RPC."""
    torch.set_num_threads(1)
    if numel:
        _held.append(torch.zeros(numel))
        _join_rpc(SHARD, rpc_port)
    serve(_store(port), lambda flat: SGD([flat], lr=1e-3), config=config)
    if numel:
        rpc.shutdown()


@contextlib.contextmanager
def _served(config: ShardConfig, numel: int = 0, rpc_port: int = 0) -> Iterator[int]:
    """The port of a store at which a shard is to be found."""
    store = _store(0, serves=True)
    process = _start(_shard, store.port, config, numel, rpc_port)
    try:
        yield store.port
        stop(store)
        process.join(TIMEOUT)
    finally:
        process.kill()


def _start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    return process


def _results(queue: Any, number: int) -> list[Any]:
    return [queue.get(timeout=TIMEOUT) for _ in range(number)]


# A push and a fetch, beside torch RPC

_held: list[Tensor] = []


def _pushed(gradient: Tensor) -> Tensor:
    """What the rival's server does: a step, and its parameters in the answer."""
    return _held[0].sub_(gradient, alpha=1e-3)


def _join_rpc(name: str, port: int) -> None:
    os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port))
    rpc.init_rpc(name, rank=int(name != SHARD), world_size=2)


def _exchanging(port: int, numel: int, rounds: int, rpc_port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    _join_rpc("replica", rpc_port)
    model, gradient = Vector(numel), torch.full((numel,), 1e-3)
    client = connect(model, _store(port), worker=0, config=DownpourConfig(fetch_delay=0))
    calls = {
        "pyops": client.step,
        "torch RPC": lambda: model.values.data.copy_(
            rpc.rpc_sync(SHARD, _pushed, args=(gradient,))
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 3):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    client.close()
    queue.put(seconds)
    rpc.shutdown()


def exchanges(numel: int, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of a push and a fetch of so many fp32 numbers, between two processes, in turn."""
    queue = multiprocessing.get_context("spawn").Queue()
    with socket.socket() as free:
        free.bind((HOST, 0))
        rpc_port = free.getsockname()[1]
    with _served(ShardConfig(), numel, rpc_port) as port:
        replica = _start(_exchanging, port, numel, rounds, rpc_port, queue)
        (found,) = _results(queue, 1)
        stop(_store(port))
        replica.join(TIMEOUT)
    seconds: dict[str, list[float]] = found
    return seconds


# Replicas whose steps sleep


def _sleeping(port: int, worker: int, seconds: float, lasts: float, queue: Any) -> None:
    """A replica; answers the moments at which its steps ended."""
    torch.set_num_threads(1)
    model, store = Vector(1024), _store(port)
    client = connect(model, store, worker=worker)
    client.step()
    store.add("ready", 1)
    queue.put(worker)
    store.wait(["begin"])
    begin, ends = time.monotonic(), []
    while time.monotonic() < begin + lasts:
        time.sleep(seconds)
        client.step()
        ends.append(time.monotonic())
    queue.put((worker, ends))
    client.close()


def uneven(seconds: Sequence[float], *, lasts: float) -> float:
    """Steps a second of all replicas, as a part of the sum of what each would take alone.

    Args:
        seconds: Of a step, for each replica.
        lasts: Seconds of the run.
    """
    queue = multiprocessing.get_context("spawn").Queue()
    with _served(ShardConfig()) as port:
        replicas = [
            _start(_sleeping, port, worker, each, lasts, queue)
            for worker, each in enumerate(seconds)
        ]
        _results(queue, len(replicas))
        _store(port).set("begin", "1")
        steps = sum(len(ends) for _, ends in _results(queue, len(replicas)))
        for replica in replicas:
            replica.join(TIMEOUT)
    return steps / lasts / sum(1 / each for each in seconds)


def killed(*, seconds: float = 0.02, lasts: float = 4.0) -> float:
    """The longest time between two steps of a replica that waits for one which is killed: none may
    be ahead of the slowest, so that the shard must first find the other lost. Less `seconds`."""
    queue = multiprocessing.get_context("spawn").Queue()
    with _served(ShardConfig(max_staleness=0)) as port:
        left, other = (
            _start(_sleeping, port, worker, seconds, lasts, queue) for worker in range(2)
        )
        _results(queue, 2)
        _store(port).set("begin", "1")
        time.sleep(lasts / 2)
        moment = time.monotonic()
        os.kill(other.pid or 0, signal.SIGKILL)
        ((_, ends),) = _results(queue, 1)
        left.join(TIMEOUT)
    after = [end for end in ends if end >= moment]
    if len(after) < 0.5 * lasts / 2 / seconds / 2:
        raise AssertionError(f"only {len(after)} steps after the other replica was killed")
    return max(b - a for a, b in zip([moment, *after], after, strict=False)) - seconds


# A slow link


def over_link(*, numel: int, codec: bool, steps: int) -> float:
    """On each rank of a `slow_link.Link`: rank 0 holds the shard, the others push and fetch; the
    median of the seconds of a step."""
    rank, address = dist.get_rank(), os.environ["MASTER_ADDR"]
    store = _store(LINK_PORT, host=address, serves=rank == 0)
    if rank == 0:
        serve(store, lambda flat: SGD([flat], lr=1e-3))
        dist.barrier()
        return 0.0
    model = Vector(numel)
    coded = Int8() if codec else None
    config = DownpourConfig(push_codec=coded, fetch_codec=coded)
    client, seconds = connect(model, store, worker=rank - 1, config=config), []
    for _ in range(steps):
        start = time.perf_counter()
        client.step()
        seconds.append(time.perf_counter() - start)
    client.close()
    store.add("closed", 1)
    while int(store.add("closed", 0)) < dist.get_world_size() - 1:
        time.sleep(0.01)
    stop(store)
    dist.barrier()
    return statistics.median(seconds[2:])
