"""Goodput: the part of the time since a run first began that went into steps which count.

started |-- setup --|-- steps --| killed, down |-- setup --|-- lost steps again --|-- steps --|
                     counted                                                       counted
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Goodput"]

STARTED = ".started"


class Goodput:
    """Of a run, for the first rank.

    Args:
        folder: Of the run; the time of its first start is kept there.
        rows: The metrics of the steps before this start that count.
        resumed: Whether the run goes on; otherwise it begins now.
    """

    def __init__(self, folder: Path, rows: Iterable[Mapping[str, Any]], *, resumed: bool) -> None:
        self._seconds = sum(row.get("step_s", 0.0) for row in rows)
        self._started = time.time()
        path = folder / STARTED
        with contextlib.suppress(OSError, ValueError):
            if resumed and path.exists():
                self._started = min(self._started, float(path.read_text()))
            else:
                path.write_text(repr(self._started))

    def step(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """What to add to the metrics of a step; nothing where they have no "step_s".

        Args:
            row: The metrics.
        """
        if "step_s" not in row:
            return {}
        self._seconds += row["step_s"]
        passed = time.time() - self._started
        return {"goodput": min(1.0, self._seconds / passed)} if passed > 0 else {}
