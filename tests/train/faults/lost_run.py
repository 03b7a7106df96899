"""`pyops train` on ranks that come and go: python lost_run.py CONFIG.toml FOLDER, under torchrun.

In the first world of 3, rank 0 and the agent of torchrun that started it are killed while the
second checkpoint is written. In a world of 2, each rank waits in step 5 until its agent asks it to
stop, as it does when another agent joins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pyops.checkpoint import writing
from pyops.config import load_config
from pyops.train import TextTraining, TrainingLoop, train

# The first checkpoint may be written while later steps run: the one that is lost goes by its name.
LOST, WAITS_AT = "step-00000008.tmp", 5
PATIENCE = 120.0  # seconds; a test that fails then shows what was said


def main() -> None:
    config, folder, ranks = load_config(sys.argv[1]), Path(sys.argv[2]), os.environ["WORLD_SIZE"]
    inner_run, inner_step = TrainingLoop.run, TextTraining.train_step
    inner_write = writing.write_tensors
    requests: list[Any] = []

    def run(self: TrainingLoop, request: Any) -> bool:
        requests.append(request)
        return inner_run(self, request)

    def train_step(self: TextTraining, *, stop: bool = False) -> Any:
        until = time.monotonic() + PATIENCE
        while (
            ranks == "2"
            and self.step == WAITS_AT
            and not requests[0].number
            and time.monotonic() < until
        ):
            (folder / "waits").touch()
            time.sleep(0.02)
        return inner_step(self, stop=stop)

    def write(path: Path, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            ranks == "3"
            and path.parent.name == LOST
            and os.environ["RANK"] == "0"
            and not (folder / "lost").exists()
        ):
            (folder / "lost").touch()
            path.write_bytes(b"half of a file")
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        return inner_write(path, tensors, *args, **kwargs)

    TrainingLoop.run = run  # type: ignore[method-assign]
    TextTraining.train_step = train_step  # type: ignore[method-assign]
    writing.write_tensors = write
    outcome = train(config)
    sys.exit(128 + outcome.stopped_by if outcome.stopped_by else 0)


if __name__ == "__main__":
    main()
