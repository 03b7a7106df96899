"""Services that keep the metrics of runs: Weights & Biases and MLflow behind one interface.

metrics.jsonl of the run's folder is the record; a tracker gets the same rows. A service that fails
stops getting them, and the run goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Tracker", "Trackers", "open_tracker"]


class Tracker(Protocol):
    """What gets the metrics of a run."""

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """The run has ended."""


class _WandB:
    def __init__(self, module: Any, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._run = module.init(name=name, dir=str(folder), config=dict(config), resume="allow")

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(row), step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, module: Any, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._module = module
        module.start_run(run_name=name)
        module.log_dict(dict(config), "config.json")

    def log(self, row: Mapping[str, float], *, step: int) -> None:
        self._module.log_metrics(dict(row), step=step)

    def close(self) -> None:
        self._module.end_run()


KINDS: dict[str, Callable[[Any, str, Path, Mapping[str, Any]], Tracker]] = {
    "wandb": _WandB,
    "mlflow": _MLflow,
}


def open_tracker(kind: str, *, name: str, folder: Path, config: Mapping[str, Any]) -> Tracker:
    """A run of a service, begun. Its own environment variables say where it is and who asks.

    Args:
        kind: "wandb" or "mlflow".
        name: Of the run.
        folder: Of the run, for files of the service.
        config: The run's configuration.

    Raises:
        ValueError: There is no such service.
        ModuleNotFoundError: Its package is not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; give one of {', '.join(KINDS)}")
    return KINDS[kind](importlib.import_module(kind), name, folder, config)


class Trackers:
    """Several of them. What goes wrong is said once, in `take_problems`, and ends that tracker.

    Args:
        kinds: See `open_tracker`.
        name: Of the run.
        folder: Of the run.
        config: The run's configuration.
    """

    def __init__(
        self, kinds: Sequence[str], *, name: str, folder: Path, config: Mapping[str, Any]
    ) -> None:
        self._open: dict[str, Tracker] = {}
        self._problems: list[str] = []
        for kind in kinds:
            try:
                self._open[kind] = open_tracker(kind, name=name, folder=folder, config=config)
            except ModuleNotFoundError as error:
                package = error.name or kind
                self._problems.append(f"no metrics for {kind}: pip install {package}")
            except Exception as error:  # of the service: it must not end the run
                self._problems.append(f"no metrics for {kind}: {error}")

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand on the numbers of a row.

        Args:
            row: With "step".
        """
        numbers = {
            key: float(value)
            for key, value in row.items()
            if key != "step" and isinstance(value, int | float)
        }
        self._each(lambda tracker: tracker.log(numbers, step=row["step"]))

    def close(self) -> None:
        """The run has ended."""
        self._each(lambda tracker: tracker.close())
        self._open = {}

    def take_problems(self) -> list[str]:
        """What went wrong since the last call."""
        found, self._problems = self._problems, []
        return found

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for kind, tracker in list(self._open.items()):
            try:
                call(tracker)
            except Exception as error:  # of the service: it must not end the run
                self._problems.append(f"no more metrics for {kind}: {error}")
                del self._open[kind]
