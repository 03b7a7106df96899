"""Shards in threads of the test's process, and replicas in threads or in processes of their own."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pyops.parameter_server import (
    ConnectConfig,
    DownpourConfig,
    ServerConfig,
    ShardConfig,
    connect,
    serve,
    stop,
)
from tests.parameter_server.replicas import adagrad, gradient, model

__all__ = [
    "Served",
    "replica",
    "replica_process",
    "served",
    "shard_process",
    "steps_of",
    "tcp_store",
]


def tcp_store(port: int = 0) -> dist.TCPStore:
    """A store that this process serves; one that another serves, where its port is given."""
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=port == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=20),
    )


class Served:
    """Shards in threads.

    Attributes:
        reports: How they ended.
        errors: What they raised.
    """

    def __init__(self, store: dist.TCPStore, optimizer: Any, shards: int, **options: Any) -> None:
        self.store, self.reports, self.errors = store, {}, []

        def hold(shard: int) -> None:
            try:
                self.reports[shard] = serve(store, optimizer, shard=shard, shards=shards, **options)
            except Exception as error:
                self.errors.append(error)

        self.threads = [threading.Thread(target=hold, args=(s,)) for s in range(shards)]
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        """End the shards."""
        stop(self.store)
        for thread in self.threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in self.threads)
        self.store.delete_key("pyops/parameter_server/stop")


@contextlib.contextmanager
def served(optimizer: Any, *, shards: int = 1, **options: Any) -> Iterator[Served]:
    """Shards that hold parameters within the block."""
    shard_threads = Served(tcp_store(), optimizer, shards, **options)
    try:
        yield shard_threads
    finally:
        shard_threads.stop()
    if shard_threads.errors:
        raise shard_threads.errors[0]


def replica(
    store: dist.Store,
    worker: int,
    steps: int,
    *,
    shards: int = 1,
    seconds: float = 0.0,
    config: DownpourConfig | None = None,
    patience: float = 20.0,
    shared_memory: bool = True,
) -> Any:
    """A replica's life: so many steps of `gradient`; the client, closed."""
    module = model()
    waits = ConnectConfig(patience=patience, beat_every=0.2, shared_memory=shared_memory)
    client = connect(module, store, worker=worker, shards=shards, config=config, patience=waits)
    store.set(f"connected/{worker}", "yes")
    for step in range(steps):
        gradient(module, worker, step)
        if seconds:
            time.sleep(seconds * (1 + (7 * worker + 3 * step) % 5))
        client.step()
        store.set(f"steps/{worker}", str(step + 1))
    client.close()
    return client


def steps_of(store: dist.Store, worker: int) -> int:
    """How many steps `replica` has taken."""
    key = f"steps/{worker}"
    return int(store.get(key)) if store.check([key]) else 0


def replica_process(port: int, worker: int, steps: int, shards: int, seconds: float) -> None:
    """`replica` as the target of a process."""
    faulthandler.register(signal.SIGUSR2)
    replica(tcp_store(port), worker, steps, shards=shards, seconds=seconds, patience=60.0)


def shard_process(port: int, shard: int, shards: int, folder: str, every: int, pipe: Any) -> None:
    """`serve` as the target of a process; sends its report."""
    faulthandler.register(signal.SIGUSR2)
    report = serve(
        tcp_store(port),
        adagrad(0.02),
        shard=shard,
        shards=shards,
        config=ShardConfig(snapshot_every=every),
        server=ServerConfig(snapshots=folder),
    )
    pipe.send(report)
