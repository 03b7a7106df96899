"""What the rooms below say through logging ("pyops"), shown among the run's own lines: the switch
to compression, say."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Notes", "collected_notes"]


class Notes(logging.Handler):
    """Keeps messages until there is a display to show them."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._show: Callable[[str], None] | None = None
        self._waiting: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._show is not None:
            self._show(record.getMessage())
        else:
            self._waiting.append(record.getMessage())

    def show(self, show: Callable[[str], None]) -> None:
        """From now on messages go to `show`, those kept so far first."""
        self._show = show
        for message in self._waiting:
            show(message)
        self._waiting = []


@contextmanager
def collected_notes() -> Iterator[Notes]:
    """Within the block, what "pyops" logs goes to these Notes and nowhere else."""
    logger, notes = logging.getLogger("pyops"), Notes()
    before = logger.level, logger.propagate
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield notes
    finally:
        logger.removeHandler(notes)
        logger.setLevel(before[0])
        logger.propagate = before[1]
