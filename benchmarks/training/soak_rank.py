"""One rank of a run of `benchmarks.training.soak`: python soak_rank.py CONFIG.toml SECONDS, with
torchrun's variables.

It is `pyops train --resume`, but that nobody waits for another rank for longer than SECONDS, and
that its process id is left in the run's folder of pids, for whoever kills it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from pyops.config import load_config
from pyops.launch import rendezvous
from pyops.train import train

__all__ = ["begin"]


def begin(variables: Mapping[str, str], log: str, path: str, seconds: float) -> None:
    """A rank in a process that was forked for it; what it says goes to a file."""
    os.environ.update(variables)
    said = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(said, 1)
    os.dup2(said, 2)
    torch.set_num_threads(1)
    sys.exit(_train(Path(path), timedelta(seconds=seconds)))


def _train(path: Path, limit: timedelta) -> int:
    absent: dict[str, Any] = dict.fromkeys(
        ("matplotlib", "torch.utils.tensorboard")
    )  # which take seconds to import
    sys.modules.update(absent)
    pid = path.parent / "pids" / os.environ.get("RANK", "0")
    pid.parent.mkdir(exist_ok=True)
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    distributed_c10d.default_pg_timeout = limit
    options: Any = rendezvous.Rendezvous.__init__.__kwdefaults__
    options["timeout"] = limit
    outcome = train(load_config(path), resume=True)
    return 128 + outcome.stopped_by if outcome.stopped_by else 0


if __name__ == "__main__":
    sys.exit(_train(Path(sys.argv[1]), timedelta(seconds=float(sys.argv[2]))))
