"""Where a run runs: the ranks that torchrun started, their devices, and the signals that end it early."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from pyops.config import ConfigError, TrainConfig

__all__ = ["StopRequest", "joined_ranks"]


@contextmanager
def joined_ranks(config: TrainConfig) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, if any; this rank's device."""
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is 'cuda', but torch sees no GPU; set it to 'cpu' or 'auto'")
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", 0))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    start = "RANK" in os.environ and not dist.is_initialized()
    if start:
        _join("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    with _deterministic() if kind == "cuda" and config.deterministic else nullcontext():
        yield device
    if start:  # not after an error: another rank may not come here
        dist.destroy_process_group()


def _join(backend: str) -> None:
    """As init_process_group. But torchrun keeps its store through a restart, with the addresses of the ranks that died, and
    who is early would call there: each attempt has a part of the store for itself."""
    store, rank, size = next(iter(rendezvous("env://")))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank, world_size=size)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Only kernels that give the same bits each time; attention's backward, above all, has faster ones that don't."""
    before = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class StopRequest:
    """SIGTERM and Ctrl-C ask for a checkpoint and an end; the loop looks at `number` once in a step."""

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
