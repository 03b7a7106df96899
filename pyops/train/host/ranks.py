"""Where a run runs: the ranks that torchrun started, their devices, and the signals that end it
early."""

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

from pyops.config import ConfigError, TrainConfig
from pyops.launch.interfaces import interface_trouble
from pyops.launch.rendezvous import Rendezvous

__all__ = ["StopRequest", "fix_products", "joined_ranks", "stand_by"]

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def joined_ranks(
    config: TrainConfig, *, active: int | None = None, request: StopRequest | None = None
) -> Iterator[torch.device]:
    """Join the ranks that torchrun started, if any; this rank's device.

    Args:
        active: How many of them, the first ones, form the process group (default: all); the others
            call `stand_by`, which returns when these have ended, with the signal that `request`
            then holds.
    """
    kind = (
        config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    )
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device is 'cuda', but torch sees no GPU; set it to 'cpu' or 'auto'"
        )
    device = (
        torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))
        if kind == "cuda"
        else torch.device(kind)
    )
    if kind == "cuda":
        torch.cuda.set_device(device)
        if config.deterministic:
            fix_products(device)
    meeting = None
    if "RANK" in os.environ and not dist.is_initialized():
        trouble = interface_trouble(int(os.environ["RANK"]), nccl=kind == "cuda")
        meeting = Rendezvous.of_environment(trouble=trouble)
        size = meeting.size if active is None else active
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, store=meeting.store, rank=meeting.rank, world_size=size)
    with _deterministic() if kind == "cuda" and config.deterministic else nullcontext():
        yield device
    if meeting is not None:  # not after an error: another rank may not come here
        dist.destroy_process_group()
        if meeting.rank == 0 and size < meeting.size:
            meeting.end(range(size, meeting.size), request.number if request is not None else 0)


def stand_by() -> int:
    """Wait, without work, until the ranks that have some have ended: the signal that ended them, or
    0."""
    return Rendezvous.of_environment().until_over()


def fix_products(device: torch.device) -> None:
    """Choose cuBLAS's workspace so that products have the same bits each time.

    torch reads the choice once in a process, at the first product on a GPU.

    Raises:
        ConfigError: When that one was before.
    """
    os.environ.setdefault(WORKSPACE, ":4096:8")
    square = torch.ones(2, 2, device=device)
    try:
        with _deterministic():
            torch.mm(square, square)
    except RuntimeError as error:
        if WORKSPACE not in str(error):
            raise
        raise ConfigError(
            f"train.deterministic needs the environment variable {WORKSPACE}=:4096:8 "
            "before the first matrix product on a GPU, "
            "and this process made one without it; set it before Python starts, or "
            "train.deterministic to false"
        ) from error


@contextmanager
def _deterministic() -> Iterator[None]:
    """Only kernels that give the same bits each time; attention's backward, above all, has faster
    ones that don't."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class StopRequest:
    """SIGTERM, Ctrl-C and SIGUSR1, by which Slurm tells that the time limit is near, ask for a
    checkpoint and an end; the loop looks at `number` once in a step. Only the first signal
    counts."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {n: signal.signal(n, self._note) for n in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
