"""A run with a rank that is killed once: python killed_run.py CONFIG.toml WHERE STEP, under
torchrun, or `train_and_die` on a rank of a test.

WHERE   "step": before its forward; "gather": when stage 3 has asked for a block's parameters;
        "save": when a file of the first checkpoint after that step is half written
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyops import failure
from pyops.checkpoint import background, writing
from pyops.config import Config, load_config
from pyops.train import TextTraining, train
from pyops.zero.hooks.unshard_hooks import UnshardHooks


def die(marker: Path) -> None:
    """Once in all: the restarted run finds the marker."""
    if os.environ["RANK"] == "1" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(rank: int, group: object, config: Config, where: str, step: int) -> Any:
    """Train; rank 1 is killed at the first time that it comes there."""
    os.environ["RANK"] = str(rank)
    marker, now = Path(config.train.folder) / "killed", {"step": -1}
    inner_step, inner_need = TextTraining.train_step, UnshardHooks._start
    inner_write = writing.write_tensors

    def train_step(self: TextTraining, *, stop: bool = False) -> Any:
        now["step"] = self.step
        if where == "step" and self.step == step:
            die(marker)
        return inner_step(self, stop=stop)

    def start(self: UnshardHooks, unit: Any, **kwargs: Any) -> None:
        inner_need(self, unit, **kwargs)
        if where == "gather" and now["step"] == step:
            die(marker)

    def write(path: Path, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if where == "save" and now["step"] + 1 >= step:
            path.write_bytes(b"half of a file")
            die(marker)
        return inner_write(path, tensors, *args, **kwargs)

    TextTraining.train_step = train_step  # type: ignore[method-assign]
    UnshardHooks._start = start  # type: ignore[method-assign]
    writing.write_tensors = write
    # Seconds for the notes of the only other rank, which was killed and leaves none.
    background.GRACE, failure.PATIENCE = 2.0, 1.0
    return train(config, resume=True)


def main() -> None:
    path, where, step = sys.argv[1:]
    train_and_die(int(os.environ["RANK"]), None, load_config(path), where, int(step))


if __name__ == "__main__":
    main()
