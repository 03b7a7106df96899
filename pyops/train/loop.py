"""TrainingLoop: the steps of a run, with its checkpoints, its metrics and its display, whatever is
trained.

    Training                                     TrainingLoop
    (a model, its data, its optimizer)
    steps() --StepResult(row, save, stop)------> display, metrics.jsonl, checkpoint, next step
    state(), load_state() <--------------------> checkpoints/step-00000200
    finish() --Outcome, what a person is told--> display

`pyops.train.text_training` trains a GPT on text, `pyops.train.sample_training` a task over numbered
samples, in a layout that follows what is frozen, `pyops.train.pretrained` a Hugging Face folder.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyops.checkpoint import Checkpoints, MemoryCheckpoints, load
from pyops.comm.agreement import on_first_rank
from pyops.config import Config, ConfigError
from pyops.observe.page import write_page
from pyops.observe.trackers import Trackers
from pyops.train.host.neighbor import memory_checkpoints, newest, states_to_come
from pyops.train.host.ranks import StopRequest
from pyops.train.host.replica import RunReplica
from pyops.train.host.run_folder import prepare_folder
from pyops.train.report.display import Display
from pyops.train.report.goodput import Goodput
from pyops.train.report.metrics import MetricsLog
from pyops.train.report.outcome import Outcome
from pyops.train.setup.state import read

__all__ = [
    "Row",
    "StepResult",
    "Training",
    "TrainingLoop",
    "check_same_options",
    "is_due",
    "refuse_folder_checkpoint",
]

Row = dict[str, Any]  # metrics of a step, as a line of metrics.jsonl has them


@dataclass(frozen=True)
class StepResult:
    """What the loop does after a step."""

    row: Row | None
    """The metrics of the step; None on a rank that had no part in it."""

    note: str = ""
    """A line for the display, after that of the step."""

    tensorboard: bool = True
    """Whether the metrics go to TensorBoard, too."""

    save: bool = False
    """Whether a checkpoint is written. The same on every rank."""

    stop: bool = False
    """Whether the run ends early, since a rank was asked to. The same on every rank."""


class Training(ABC):
    """A model, its data and its optimizer, as the loop sees them."""

    config: Config
    device: torch.device
    num_steps: int
    """Steps of the whole run."""

    @property
    @abstractmethod
    def step(self) -> int:
        """The number of steps that were taken."""

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self.step >= self.num_steps

    @abstractmethod
    def introduction(self) -> str:
        """What is trained, and on what, for the display."""

    @abstractmethod
    def steps(self, request: StopRequest) -> Iterator[StepResult]:
        """Take one step after the other, until none is left or one of them says to stop.

        Args:
            request: Holds the signal that this process was sent, if any.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""

    @abstractmethod
    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint, written on any number of ranks.

        Args:
            state: The checkpoint; its tensors may be on the disk still.
            path: The checkpoint's folder, for messages.

        Raises:
            ConfigError: The checkpoint is of another model, or of another kind of run.
        """

    @abstractmethod
    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """Draw the curves, and say how the run went. All ranks call it, once.

        Args:
            rows: The metrics of all steps; empty on every rank but the first.
            stopped_by: The signal that ended the run early, or 0.

        Returns:
            How the run ended, and lines for the display.
        """


def is_due(step: int, every: int) -> bool:
    """Whether something happens after this step that happens `every` steps; 0 is never."""
    return every > 0 and step % every == 0


def check_same_options(
    path: Path, options: Mapping[str, Any], checkpoint_options: Mapping[str, Any]
) -> None:
    """Compare the options that decide which states there are with those of a checkpoint.

    Args:
        path: The checkpoint's folder.
        options: Values of this run, by their keys in the configuration.
        checkpoint_options: Those of the run that wrote the checkpoint; a key may be absent from it.

    Raises:
        ConfigError: A value differs.
    """
    for key, value in options.items():
        before = checkpoint_options.get(key, value)
        if before != value:
            raise ConfigError(
                f"{key} is {value!r}, but checkpoint {path} was made with {before!r}; set it to "
                "that, or give this run another name"
            )


def refuse_folder_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of a run that trains a Hugging Face folder, for one that does not.

    Args:
        path: The checkpoint's folder.
        state: The checkpoint.

    Raises:
        ConfigError: It is of such a run.
    """
    if "trainer" in state:
        raise ConfigError(
            f"checkpoint {path} is of a run that trains a Hugging Face folder; set model.folder as "
            "it was, or give this run another name"
        )


class TrainingLoop:
    """Runs a `Training` to its end, or to the signal that ends it early."""

    def __init__(
        self,
        make_training: Callable[[Path | None], Training],
        config: Config,
        *,
        resume: bool = False,
        replica: RunReplica | None = None,
    ) -> None:
        """Make what is trained, and the folder of the run; go on from a checkpoint.

        Args:
            make_training: Makes what is trained, given the folder of the checkpoint that the run
                goes on from, or None.
            config: The run's configuration.
            resume: Whether to go on from the newest checkpoint in the run's folder. Otherwise an
                earlier run there is moved aside.
            replica: Of a run whose dead ranks are replaced; it goes on from the state that the
                ranks hold, if they hold one.

        Raises:
            ConfigError: On every rank alike, for what the user can put right.
        """
        self.config = config
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        # A copy of states in files, to be written in the background, would take the memory that
        # they were put there to save.
        background = config.zero.offload in ("none", "cpu")
        self.checkpoints = Checkpoints(
            config.folder / "checkpoints", keep=config.train.num_checkpoints, background=background
        )
        self.replica = replica
        held = replica.take_held() if replica is not None else None
        search = resume and held is None
        latest = on_first_rank(self.checkpoints.latest) if search else None
        said: list[str] = []
        self.memory: MemoryCheckpoints | None = None
        if resume:
            self.memory = memory_checkpoints(config)
            latest, said = newest(latest, self.memory, self.checkpoints.folder)
        self.training = make_training(latest)
        on_first_rank(lambda: prepare_folder(config, resume=resume))
        if latest is not None:
            self.restore(latest)
        if held is not None:
            self._take_up(held.state, held.own, path=config.folder)
        if not resume:
            self.memory = memory_checkpoints(config)
        self._check_memory()
        self._memory_seconds = 0.0
        self.log: MetricsLog | None = None
        self.goodput: Goodput | None = None
        self.trackers: Trackers | None = None
        if self.rank == 0:
            self.log = MetricsLog(
                config.folder,
                first_step=self.training.step,
                tensorboard=config.train.tensorboard,
            )
            self.goodput = Goodput(
                config.folder, self.log.rows, resumed=latest is not None or held is not None
            )
            self.trackers = Trackers(
                config.observe.trackers,
                name=config.name,
                folder=config.folder,
                config=asdict(config),
            )
        self.display = Display(
            config.name,
            num_steps=self.training.num_steps,
            first_step=self.training.step,
            every=config.train.log_every,
            quiet=self.rank != 0,
        )
        text = self.training.introduction()
        if held is not None:
            text = f"{text}\nhealed: from step {held.step}, which the ranks had kept"
        elif latest is not None:
            text = f"{text}\nresumed from {latest}"
        elif resume:
            text = f"{text}\nno checkpoint in {self.checkpoints.folder}: from the beginning"
        self.display.note("\n".join([text, *said]))

    def _check_memory(self) -> None:
        """Refuse a memory that is too small for the checkpoints in it."""
        if self.memory is None:
            return
        state, own = self._state()
        to_come = 0 if self.training.step else states_to_come(self.config)
        self.memory.check_room(state, own=own, states_to_come=to_come)

    def run(self, request: StopRequest) -> bool:
        """Take all steps that are left.

        Args:
            request: Holds the signal that this process was sent, if any.

        Returns:
            Whether a signal to any rank ended the run early.
        """
        if self.replica is not None and not self.training.is_over:
            self._copy(self.replica)
        for result in self.training.steps(request):
            if result.row is not None:
                self.write(result.row, tensorboard=result.tensorboard)
            if result.note:
                self.display.note(result.note)
            if result.save:
                self.save()
            if result.stop:
                return True
            if self.memory is not None and not self.training.is_over:
                self._save_to_memory(self.memory)
            if self.replica is not None and self.replica.due(self.training.step):
                self._copy(self.replica)
        return False

    def write(self, row: Row, *, tensorboard: bool = True) -> None:
        """Show the metrics of a step, and append them to the log."""
        if self._memory_seconds:
            row = {**row, "memory_checkpoint_s": self._memory_seconds}
            self._memory_seconds = 0.0
        if self.goodput is not None:
            row = {**row, **self.goodput.step(row)}
        self.display.step(row)
        if self.log is None:
            return
        self.log.write(row, tensorboard=tensorboard)
        for problem in self.log.take_problems():
            self.display.note(problem)
        if self.trackers is not None:
            self.trackers.log(row)
            for problem in self.trackers.take_problems():
                self.display.note(problem)

    def save(self) -> Path:
        """Write a checkpoint of the steps taken so far; returns its folder."""
        state, own = self._state()
        return self.checkpoints.save(self.training.step, state, own=own)

    def _save_to_memory(self, memory: MemoryCheckpoints) -> None:
        """Write the state to host memory, this rank's and its neighbor's, if that is due."""
        if not is_due(self.training.step, self.config.train.memory_checkpoint_every):
            return
        start = time.perf_counter()
        state, own = self._state()
        memory.save(self.training.step, state, own=own)
        self._memory_seconds = time.perf_counter() - start

    def _copy(self, replica: RunReplica) -> None:
        """Copy the state to this rank's memory and its neighbor's, for the replacement of one."""
        start = time.perf_counter()
        replica.save(self.training.step, *self._state())
        self._memory_seconds = time.perf_counter() - start

    def _state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: of all ranks, and of this one alone."""
        # First the state: with it a rank without a part in the layout is told the others' steps.
        state, device = self.training.state(), self.training.device
        own = {"torch": torch.get_rng_state()}
        if device.type == "cuda":
            own["cuda"] = torch.cuda.get_rng_state(device)
        return state, own

    def restore(self, path: Path) -> None:
        """Go on from the checkpoint in this folder, written on any number of ranks.

        Raises:
            ConfigError: The checkpoint is of another model, or of another kind of run.
        """
        # Without `compare`, damage that one rank alone meets later would leave the others waiting.
        state, own = load(path, lazy=True, compare=True)
        self._take_up(state, own, path=path)

    def _take_up(self, state: Mapping[str, Any], own: Any, *, path: Path) -> None:
        self.training.load_state(state, path)
        if own is None:
            return
        own, device = read(own), self.training.device
        torch.set_rng_state(own["torch"])
        if device.type == "cuda" and "cuda" in own:
            torch.cuda.set_rng_state(own["cuda"], device)

    def finish(self, *, stopped_by: int = 0) -> Outcome:
        """Close the log and the checkpoints, draw the curves, and say how the run went.

        Args:
            stopped_by: The signal that ended the run early, or 0.
        """
        self.display.close()
        self.checkpoints.wait()
        if self.memory is not None:
            self.memory.remove()  # the last checkpoint is on the disk
        rows = self.log.rows if self.log is not None else []
        outcome, notes = self.training.finish(rows, stopped_by=stopped_by)
        if self.log is not None:
            self.log.close()
            notes += self._written_page()
        if self.trackers is not None:
            self.trackers.close()
        if stopped_by:
            name = signal.Signals(stopped_by).name
            notes.append(f"stopped by {name} after step {outcome.steps}; continue with --resume")
        for note in notes:
            self.display.note(note)
        return outcome

    def abandon(self) -> None:
        """Of this rank alone, before it leaves because of an error: let a checkpoint under way end,
        if it does so soon, and close what another loop of this process will open again."""
        self.checkpoints.close()
        if self.replica is None:
            return
        self.display.close()
        for each in (self.log, self.trackers):
            if each is not None:
                each.close()

    def _written_page(self) -> list[str]:
        """Write run.html; what there is to say of it."""
        if not self.config.observe.page:
            return []
        try:
            return [f"page of the run: {write_page(self.config.folder)}"]
        except (OSError, ValueError) as error:
            return [f"no page of the run: {error}"]
