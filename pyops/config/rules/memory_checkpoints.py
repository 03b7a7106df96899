"""Which runs take checkpoints in memory."""

from __future__ import annotations

from pyops.config.run_sections import RunSections

__all__ = ["check_memory_checkpoints"]


def check_memory_checkpoints(config: RunSections) -> None:
    """ValueError for a run whose ranks do not end each step together with the loop."""
    every = config.train.memory_checkpoint_every
    if every and (config.task.kind != "text" or config.elastic.on or config.asynchronous.on):
        raise ValueError(
            f"train.memory_checkpoint_every is {every}, which a run over text takes whose ranks "
            "take each step together, without [elastic] and [asynchronous]; set it to 0"
        )
