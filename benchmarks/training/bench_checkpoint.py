"""How long a checkpoint keeps training waiting: saved in the background, or in memory and to a
neighbor's, beside saved at once; and all read back and compared.

Saves take turns; each goes to a folder of its own under TMPDIR, and is flushed to the disk. The
first of each, which makes the copy's memory and the files' blocks, is left out.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from benchmarks.instruments import machine
from benchmarks.instruments.harness import Row, format_row, quantiles
from pyops.checkpoint import BackgroundSaver, MemoryCheckpoints, load, save
from pyops.flat import Shard

__all__ = ["run"]

MIB = 256
TENSORS = 64
ROUNDS = 5
SIZES = (1, 2)  # processes
AIM = 10.0  # times shorter
IN_MEMORY = "/dev/shm"  # where a disk takes no part


def _check(folder: Path, state: dict[str, dict[str, Shard]]) -> None:
    found, _ = load(folder)
    for name, shard in state["model"].items():
        mine = found["model"][name].view(-1)[
            shard.offset[0] : shard.offset[0] + shard.tensor.numel()
        ]
        if not torch.equal(mine, shard.tensor):
            raise AssertionError(f"{folder} does not hold what was saved")


def _slowest(seconds: float) -> float:
    """Of all ranks: the step after it begins together."""
    told = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _run_of(folder: Path) -> str:
    """The id of the run whose checkpoints in memory are taken."""
    return folder.name.rpartition("-")[2]


def _measure(folder: Path, rounds: int, *, rank: int = 0, size: int = 1) -> dict[str, list[float]]:
    """Seconds that a save blocks the slowest rank, by way. Each rank has a part of every tensor."""
    whole = (MIB << 20) // 4 // TENSORS
    numel = whole // size
    state = {
        "model": {
            f"w{i}": Shard((whole,), (rank * numel,), torch.full((numel,), float(i + rank)))
            for i in range(TENSORS)
        }
    }
    saver = BackgroundSaver()
    memory = MemoryCheckpoints(IN_MEMORY, run=_run_of(folder))
    memory.check_room(state)
    seconds: dict[str, list[float]] = {"background": [], "memory": [], "at once": []}
    for turn in range(rounds + 1):
        start = time.perf_counter()
        saver.save(folder / "background", state)
        blocked = _slowest(time.perf_counter() - start)
        saver.wait()
        _slowest(0.0)
        start = time.perf_counter()
        memory.save(turn, state)
        handed = _slowest(time.perf_counter() - start)
        start = time.perf_counter()
        save(folder / "at_once", state)
        waited = _slowest(time.perf_counter() - start)
        if turn:
            seconds["background"].append(blocked)
            seconds["memory"].append(handed)
            seconds["at once"].append(waited)
    for way in ("background", "at_once"):
        _check(folder / way, state)
    recovered, _ = memory.recover(folder / "recovered", newer_than=-1)
    if recovered is None:
        raise AssertionError(f"{memory.folder} has no whole step")
    _check(recovered, state)
    return seconds


def _serve(rank: int, size: int, port: int, folder: Path, rounds: int, told: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=size)
    seconds = _measure(folder, rounds, rank=rank, size=size)
    if rank == 0:
        told.put(seconds)
    dist.destroy_process_group()


def _measure_on(size: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    if size == 1:
        return _measure(folder, rounds)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_serve, (size, port, folder, rounds, told), nprocs=size)
    return told.get()  # type: ignore[no-any-return]


def _names(size: int) -> dict[str, str]:
    """The case of each way that is set beside a save at once."""
    on = f"save {MIB} MiB{{}}, {size} process{'es' if size > 1 else ''}: training waits"
    return {"background": on.format(""), "memory": on.format(" in memory")}


def _rows(size: int, options: Any) -> list[Row]:
    names = {
        way: name
        for way, name in _names(size).items()
        if options.only is None or options.only in name
    }
    if not names:
        return []
    folder = Path(tempfile.mkdtemp(prefix="pyops-bench-"))
    try:
        seconds = _measure_on(size, folder, min(options.rounds, ROUNDS))
    finally:
        for left in (folder, Path(IN_MEMORY) / f"pyops-{_run_of(folder)}"):
            shutil.rmtree(left, ignore_errors=True)
    rows = []
    for way, name in names.items():
        ratio = statistics.median(seconds["at once"]) / statistics.median(seconds[way])
        row: Row = {
            "bench": "checkpoint",
            "case": name,
            "device": "cpu",
            "us": {each: quantiles(seconds[each]) for each in (way, "at once")},
            "speedup": {"at once": round(ratio, 3)},
            # A checkpoint in memory is whole when training goes on, that in the background is not.
            "targets": {"at once": AIM} if way == "background" else {},
            "max_error": 0.0,
            "rounds": len(seconds["at once"]),
            "ranks": size,
            "machine": machine.describe(torch.device("cpu")),
            "versions": machine.versions(),
            "commit": machine.commit(),
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        }
        print(format_row(row), flush=True)
        rows.append(row)
    return rows


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    return [row for size in SIZES for row in _rows(size, options)]
