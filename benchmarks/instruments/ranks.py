"""Several processes that time one case together: gloo ranks with one thread each, or one NCCL rank
per GPU.

The first rank prints each row as it comes, and its rows are the result.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.instruments.harness import Case, FailedCases, Row, format_row, keep_row, measure

__all__ = ["GroupRanks", "measure_on_ranks"]

MakeCases = Callable[..., Iterable[Case | Callable[[], Case]]]


class GroupRanks:
    """`harness.Ranks` over the default process group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def barrier(self) -> None:
        dist.all_reduce(torch.zeros(1, device=self._device))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def agree(self, value: int) -> int:
        return int(self._first(float(value)))

    def slowest(self, seconds: float) -> float:
        worst = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst)

    def _first(self, value: float) -> float:
        told = torch.tensor(value, dtype=torch.float64, device=self._device)
        dist.broadcast(told, 0)
        return float(told)


def _serve(
    rank: int,
    size: int,
    port: int,
    device_type: str,
    make_cases: MakeCases,
    options: Any,
    rows: Any,
) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=120)
    )
    ranks = GroupRanks(device)
    for given in make_cases(device=device, options=options):
        row = measure(
            given if isinstance(given, Case) else given(), rounds=options.rounds, ranks=ranks
        )
        if rank == 0:
            print(format_row(row), flush=True)
            keep_row(row)
            rows.put(row)
    dist.destroy_process_group()


def measure_on_ranks(make_cases: MakeCases, *, size: int, options: Any) -> list[Row]:
    """Rows of the cases that `make_cases(device=, options=)`, a function at module level, gives on
    each of `size` ranks.

    On CUDA each rank needs a GPU of its own: without enough of them there are no rows.

    Raises:
        FailedCases: A rank raised or died; with the rows of the cases before.
    """
    if options.device.type == "cuda" and torch.cuda.device_count() < size:
        print(
            f"{size} ranks need {size} GPUs, this machine has "
            f"{torch.cuda.device_count()}: nothing to time"
        )
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows = torch.multiprocessing.get_context("spawn").SimpleQueue()
    told = SimpleNamespace(
        rounds=options.rounds, only=options.only
    )  # whose class a new process knows
    arguments = (size, port, options.device.type, make_cases, told, rows)
    running = torch.multiprocessing.spawn(_serve, arguments, nprocs=size, join=False)
    found: list[Row] = []
    try:
        while not running.join(timeout=0.2):
            found += _come(rows)
    except (
        torch.multiprocessing.ProcessExitedException,
        torch.multiprocessing.ProcessRaisedException,
    ) as error:
        raise FailedCases(found + _come(rows), [str(error).strip()]) from None
    return found + _come(rows)


def _come(rows: Any) -> list[Row]:
    """What is in the queue, which a rank waits to put more in where it is full."""
    found = []
    while not rows.empty():
        found.append(rows.get())
    return found
