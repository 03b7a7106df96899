"""The folder of a run: one run at a time writes to it, and an earlier one is moved aside, but when
torchrun or Slurm starts the same run again: that goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pyops.comm.agreement import gather, on_first_rank
from pyops.config import Config, ConfigError

__all__ = ["continues", "finished", "only_run_in", "prepare_folder"]

MARK = ".launch"
UNNAMED = "none"  # torchrun's id of a run that was given none


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold a lock beside the run's folder: two runs in one would mix their metrics and remove each
    other's checkpoints."""
    held: list[int] = []  # file descriptors; of the first rank

    def take() -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.append(os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT))
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to {folder}; wait for it, or give this one a "
                "name: --set name=other"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder} can't be written: {error.strerror or error}; set train.folder "
                "to another folder"
            ) from None

    try:
        on_first_rank(take)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def prepare_folder(config: Config, *, resume: bool) -> None:
    """Make the folder of the run, note the configuration and the launch's id in it; without
    `resume` an earlier run there is moved aside."""
    folder = config.folder
    try:
        if not resume and (folder / "metrics.jsonl").exists():
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(config), indent=2))
        finished(folder)
        if (name := _launch_id()) is not None:
            (folder / MARK).write_text(name)
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written: {error.strerror or error}; set train.folder to "
            "another folder"
        ) from None


def continues(folder: Path) -> bool:
    """Whether it is this launch's run that lies in `folder`, torchrun's or that of Slurm's job, so
    that its processes were started again. A collective.

    How often an agent of torchrun has restarted doesn't say it: that differs between agents, and is
    0 for a new one. The id of the run does; where it has none, at least one agent has to have
    restarted.
    """
    name = _launch_id()
    restarts = max(gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))))
    found = on_first_rank(lambda: _read(folder / MARK))
    return name is not None and found == name and (name != UNNAMED or restarts > 0)


def _launch_id() -> str | None:
    """torchrun's id of the run, or Slurm's of the job, which a requeued job keeps."""
    if (name := os.environ.get("TORCHELASTIC_RUN_ID")) is not None:
        return name
    job = os.environ.get("SLURM_JOB_ID")
    return None if job is None else f"job {job} of Slurm"


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def finished(folder: Path) -> None:
    """All steps are done: the same command begins anew. For the first rank."""
    (folder / MARK).unlink(missing_ok=True)
