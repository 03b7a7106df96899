"""How long a checkpoint keeps training waiting: saved in the background, beside saved at once; and both read back and compared.

Saves take turns; each goes to a folder of its own under TMPDIR, and is flushed to the disk. The first of each, which makes the
copy's memory and the files' blocks, is left out.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.harness import Row, format_row, quantiles
from pyops.checkpoint import BackgroundSaver, load, save

__all__ = ["run"]

MIB = 256
TENSORS = 64
ROUNDS = 5
AIM = 10.0  # times shorter


def _check(folder: Path, state: dict[str, dict[str, Tensor]]) -> None:
    found, _ = load(folder)
    if not all(torch.equal(found["model"][name], tensor) for name, tensor in state["model"].items()):
        raise AssertionError(f"{folder} does not hold what was saved")


def _measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds that a save blocks, by way."""
    numel = (MIB << 20) // 4 // TENSORS
    state = {"model": {f"w{i}": torch.full((numel,), float(i)) for i in range(TENSORS)}}
    saver = BackgroundSaver()
    seconds: dict[str, list[float]] = {"background": [], "at once": []}
    for turn in range(rounds + 1):
        start = time.perf_counter()
        saver.save(folder / "background", state)
        middle = time.perf_counter()
        saver.wait()
        again = time.perf_counter()
        save(folder / "at_once", state)
        if turn:
            seconds["background"].append(middle - start)
            seconds["at once"].append(time.perf_counter() - again)
    for way in ("background", "at_once"):
        _check(folder / way, state)
    return seconds


def run(options: Any) -> list[Row]:
    """The rows of this bench."""
    name = f"save {MIB} MiB, 1 process: training waits"
    if options.only is not None and options.only not in name:
        return []
    folder = Path(tempfile.mkdtemp(prefix="pyops-bench-"))
    try:
        seconds = _measure(folder, min(options.rounds, ROUNDS))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    ratio = statistics.median(seconds["at once"]) / statistics.median(seconds["background"])
    row: Row = {
        "bench": "checkpoint", "case": name, "device": "cpu", "us": {way: quantiles(each) for way, each in seconds.items()},
        "speedup": {"at once": round(ratio, 3)}, "targets": {"at once": AIM}, "max_error": 0.0,
        "rounds": len(seconds["at once"]),
        "machine": machine.describe(torch.device("cpu")), "versions": machine.versions(), "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(format_row(row), flush=True)
    return [row]
