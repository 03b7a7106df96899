"""What goes on beside a run: the flight record of its collectives, and the count of its restarts.

runs/small/flight/     this start's; flight.1, flight.2: of starts that failed
runs/small/.restarts   {"checkpoint": "step-00000200", "idle": 2}
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from pyops.checkpoint import Checkpoints
from pyops.comm.agreement import on_first_rank
from pyops.config import Config, ConfigError
from pyops.flight_record import FINISHED, recording
from pyops.observe import FlightError, read_records, watched

__all__ = ["check_progress", "observed"]

RESTARTS = ".restarts"


@contextmanager
def observed(config: Config) -> Iterator[None]:
    """Within the block, note the collectives of two or more ranks, and watch them.

    Args:
        config: Of the run.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if not config.observe.flight_record or size == 1:
        yield
        return
    folder = config.folder / "flight"
    on_first_rank(lambda: _set_aside(folder))
    with recording(folder) as record, watched(record, patience=config.observe.patience):
        yield


def _set_aside(folder: Path) -> None:
    """Keep the records of a start that failed; those of one that ended are not needed."""
    if not folder.exists():
        return
    with contextlib.suppress(FlightError):
        if any(record.life != FINISHED for record in read_records(folder).values()):
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
            return
    shutil.rmtree(folder)


def check_progress(config: Config, *, restarted: bool) -> None:
    """Count a restart; refuse to go on where several in a row found no newer checkpoint. A
    collective.

    Args:
        config: Of the run.
        restarted: Whether torchrun started these processes again.

    Raises:
        ConfigError: On every rank alike: observe.max_idle_restarts is exceeded.
    """
    most = config.observe.max_idle_restarts
    if not most:
        return
    if not restarted:
        on_first_rank(lambda: (config.folder / RESTARTS).unlink(missing_ok=True))
        return
    idle, newest = on_first_rank(lambda: _count(config.folder))
    if idle > most:
        raise ConfigError(
            f"{config.folder} was restarted {idle} times without a newer checkpoint than "
            f"{newest or 'the beginning'}, so it makes no progress; correct what ends it (see "
            f"pyops flight {config.folder}), lower train.checkpoint_every, which is "
            f"{config.train.checkpoint_every}, or set observe.max_idle_restarts, which is {most}, "
            "to 0"
        )


def _count(folder: Path) -> tuple[int, str]:
    """How many restarts in a row found this newest checkpoint, and its name."""
    path = folder / RESTARTS
    latest = Checkpoints(folder / "checkpoints").latest()
    newest = latest.name if latest is not None else ""
    try:
        before = json.loads(path.read_text())
        idle = int(before["idle"]) + 1 if before["checkpoint"] == newest else 1
    except (OSError, ValueError, KeyError, TypeError):
        idle = 1
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"checkpoint": newest, "idle": idle}))
    return idle, newest
