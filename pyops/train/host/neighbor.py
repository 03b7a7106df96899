"""Where a run goes on: from the checkpoint on the disk, or from a newer one in the memory of its
ranks and their neighbors."""

from __future__ import annotations

import json
import logging
import uuid
from pathlib import Path

from pyops.checkpoint import MemoryCheckpoints
from pyops.comm.agreement import on_first_rank
from pyops.config import Config, ConfigError

__all__ = ["memory_checkpoints", "newest", "states_to_come"]

RUN_ID = ".run-id"
logger = logging.getLogger(__name__)


def memory_checkpoints(config: Config) -> MemoryCheckpoints | None:
    """The checkpoints in memory of the run in this folder, None where the configuration has none. A
    collective.

    The id of the run lies in its folder: a run that goes on has the one that it began with. A copy
    of the folder is another run, which must neither take nor remove the copies of the first, so the
    id counts where it was written and nowhere else.

    Raises:
        ConfigError: On all ranks alike, if the folder can't be written.
    """
    if not config.train.memory_checkpoint_every:
        return None
    run = on_first_rank(lambda: _run_id(config.folder))
    return MemoryCheckpoints(config.train.memory_checkpoint_folder, run=run)


def _run_id(folder: Path) -> str:
    """The id that lies in the folder of a run, or a new one."""
    path, here = folder / RUN_ID, str(folder.resolve())
    try:
        found = _read_id(path)
        if found is not None and found[1] == here:
            return found[0]
        if found is not None:
            logger.info(
                f"{path} is of the run in {found[1]}, whose checkpoints in memory are left to it: "
                "if that folder was moved here, rather than copied, move it back to use them"
            )
        folder.mkdir(parents=True, exist_ok=True)
        name = uuid.uuid4().hex
        path.write_text(json.dumps({"run": name, "folder": here}))
        return name
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error.strerror or error}; set train.folder to another "
            "folder"
        ) from None


def _read_id(path: Path) -> tuple[str, str] | None:
    """The id of a run, and the folder in which it was written; None where there is none."""
    try:
        told = json.loads(path.read_text())
        run, folder = str(told["run"]), str(told["folder"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # or a run was killed writing it
        return None
    return (run, folder) if run.isalnum() else None


def newest(
    latest: Path | None, memory: MemoryCheckpoints | None, folder: Path
) -> tuple[Path | None, list[str]]:
    """The checkpoint that a run goes on from, and what there is to say of copies in memory. A
    collective.

    Args:
        latest: The newest on the disk, if any.
        memory: The run's checkpoints in memory, if any.
        folder: Of the checkpoints on the disk.
    """
    if memory is None:
        return latest, []
    step = -1 if latest is None else int(latest.name.removeprefix("step-").removesuffix(".old"))
    found, said = memory.recover(folder, newer_than=step)
    if found is None:
        return latest, said
    return found, [*said, f"{found.name} was in memory: newer than what was on the disk"]


def states_to_come(config: Config) -> int:
    """How many numbers of fp32, at most, the optimizer adds to the state for each number in it, in
    its first step."""
    moments = 1 if config.optimizer.name in ("sgd", "lion", "lars", "adagrad", "adafactor") else 2
    return moments + (config.precision.dtype != "fp32")
