"""The folder of a run: one run at a time writes to it, and an earlier one is moved aside."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pyops.comm.agreement import on_first_rank
from pyops.config import Config, ConfigError

__all__ = ["only_run_in", "prepare_folder"]


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold a lock beside the run's folder: two runs in one would mix their metrics and remove each other's checkpoints."""
    held: list[int] = []  # file descriptors; of the first rank

    def take() -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            held.append(os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT))
            fcntl.flock(held[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run is writing to {folder}; wait for it, or give this one a name: --set name=other"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{folder} can't be written: {error.strerror or error}; set train.folder to another folder"
            ) from None

    try:
        on_first_rank(take)
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)


def prepare_folder(config: Config, *, resume: bool) -> None:
    """Make the folder of the run, note the configuration in it; without `resume` an earlier run there is moved aside."""
    folder = config.folder
    try:
        if not resume and (folder / "metrics.jsonl").exists():
            number = 1
            while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
                number += 1
            folder.rename(aside)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(config), indent=2))
    except OSError as error:
        raise ConfigError(f"{folder} can't be written: {error.strerror or error}; set train.folder to another folder") from None
