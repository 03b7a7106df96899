"""TokenTraining: what the runs over text have in common, whoever takes their steps: a GPT, and the
model of a Hugging Face folder.

    one step:   batch -> trainer.step (any layout) -> metrics
    at the end: the curve, the trained model, a sample of text, a summary
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from pyops.comm.agreement import gather
from pyops.host_heap import trim_after
from pyops.mesh import Mesh
from pyops.train.host.ranks import StopRequest
from pyops.train.loop import Row, StepResult, Training, is_due
from pyops.train.report.metrics import peak_memory_gib, plot_losses
from pyops.train.report.outcome import Outcome
from pyops.train.report.step_watch import StepWatch
from pyops.train.setup.strategy import TokenTrainer

__all__ = ["TokenTraining"]


class TokenTraining(Training):
    """A model that learns the next tokens of a text.

    Attributes:
        trainer: Takes the steps.
        mesh: The ranks.
        rank: Of this process.
        lr_at: The learning rate of a step.
        inputs: The name of the tokens [rows, T] in a batch.
        unit: Of losses.
        last_file: In the folder of the run, the last thing that a run writes at its end.
        bigram_loss: Of a model that knows pairs of bytes alone; None where losses are per token.
        peak_gib: The most memory that was held before the mark of the peak was set back.
    """

    trainer: TokenTrainer
    mesh: Mesh
    rank: int
    lr_at: Callable[[int], float]
    inputs: str
    unit: str
    last_file: str
    bigram_loss: float | None = None
    peak_gib = 0.0
    _first_step = 0
    _batch: Mapping[str, Any]  # that of the last step
    _watch: StepWatch | None = None

    @property
    def step(self) -> int:
        """The number of steps that were taken, skipped ones too."""
        return self.trainer.num_steps

    @abstractmethod
    def next_batch(self) -> Mapping[str, Any]:
        """This rank's rows of the next step, on its device."""

    @abstractmethod
    def validation(self) -> Iterator[Mapping[str, Any]]:
        """The rows held out, in batches."""

    @abstractmethod
    def sample(self) -> str:
        """The beginning of a row held out, continued by the model, on the first rank. A
        collective."""

    def on_layout(self, model: str, data: str, stages: str) -> str:
        """What is trained, and on what, for the display.

        Args:
            model: In words.
            data: In words.
            stages: Of the pipeline, in words; "" without one.
        """
        num_ranks = math.prod(self.mesh.axes.degrees().values())
        text = f"{model} on {num_ranks} x {self.device.type}, {data}"
        if num_ranks > 1:
            sizes = {axis: self.mesh.size(axis) for axis in ("pp", "dp", "cp", "tp")}
            text += "\n" + " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)
        return f"{text}; {stages}" if stages else text

    def steps(self, request: StopRequest) -> Iterator[StepResult]:
        """Take one step after the other; see `Training.steps`."""
        options = self.config.train
        while not self.is_over:
            row, stop, note = self.take_step(stop=bool(request.number))
            found = self._watched().after(row, self._batch, seconds=row["step_s"])
            note = "\n".join([*([note] if note else []), *found])
            last = self.is_over
            if last or is_due(self.step, options.validate_every):
                row["validation_loss"] = self.validate()
            yield StepResult(
                row,
                note,
                tensorboard=last
                or "validation_loss" in row
                or is_due(self.step, options.log_every),
                save=stop or last or is_due(self.step, options.checkpoint_every),
                stop=stop and not last,
            )

    def take_step(self, *, stop: bool) -> tuple[Row, bool, str]:
        """As `train_step`; and a line for the display."""
        return *self.train_step(stop=stop), ""

    def train_step(self, *, stop: bool = False) -> tuple[Row, bool]:
        """Take one optimizer step.

        Args:
            stop: Whether this rank is to stop.

        Returns:
            The metrics of the step, and whether any rank is to stop.
        """
        started, step, trainer = time.perf_counter(), self.step, self.trainer
        lr, skipped = self.lr_at(step), trainer.skipped
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        batch = self._batch = self.next_batch()
        loss = trainer.step(batch, vote=stop)
        num_tokens = self.config.train.batch * batch[self.inputs].shape[1]
        scale = trainer.loss_scale
        seconds = time.perf_counter() - started
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": lr,
            "grad_norm": trainer.grad_norm if trainer.skipped == skipped else None,
            "tokens_per_s": num_tokens / seconds,
            "step_s": seconds,
            "memory_gib": self.most_gib,
            "skipped": trainer.skipped,
            **({} if scale is None else {"loss_scale": scale.scale}),
            **self.sent(),
        }
        trim_after(self.step)
        return row, trainer.vote

    @property
    def most_gib(self) -> float:
        """The most memory that this process has held so far."""
        return max(self.peak_gib, peak_memory_gib(self.device))

    def replicated(self) -> Mapping[str, torch.Tensor]:
        """What all ranks of the axis dp should have alike, bit for bit, by name."""
        return {}

    def _watched(self) -> StepWatch:
        if self._watch is None:
            self._watch = StepWatch(
                self.config, self.mesh, device=self.device, replicated=self.replicated
            )
        return self._watch

    def sent(self) -> Row:
        """Metrics of what the last step sent, where that is counted."""
        return {}

    def validate(self) -> float:
        """The loss of the rows held out, the same on every rank."""
        return self.trainer.evaluate(self.validation())

    def write_model(self) -> str:
        """Write the trained model, where the run leaves one besides its checkpoints. A collective.

        Returns:
            A line that says where it is; "" where there is none.
        """
        return ""

    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """Draw the curve, write the model and a sample of text, say how it went; see
        `Training.finish`."""
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
        outcome = Outcome(
            self.step,
            held_out[-1] if held_out else None,
            self.bigram_loss,
            self.trainer.skipped,
            stopped_by,
        )
        folder, options = self.config.folder, self.config.train
        written = self._first_step >= self.num_steps and any(
            gather((folder / self.last_file).exists())
        )
        text = model = ""
        if not stopped_by and not written:
            model = self.write_model()
            text = self.sample() if options.num_sample_tokens else ""
        notes: list[str] = []
        if self.rank:
            return outcome, notes
        picture = folder / "loss.png"
        if options.plot and plot_losses(
            picture, rows, bigram_loss=self.bigram_loss, title=self.config.name, unit=self.unit
        ):
            notes.append(f"loss curve: {picture}")
        if stopped_by:
            return outcome, notes
        if text:
            (folder / "sample.txt").write_text(text)
            notes.append(f"--- a sample ({folder / 'sample.txt'}) ---\n{text}\n---")
        return outcome, [*notes, *([model] if model else []), self._summary(outcome)]

    def _summary(self, outcome: Outcome) -> str:
        loss = "none" if outcome.validation_loss is None else f"{outcome.validation_loss:.3f}"
        beside = "" if self.bigram_loss is None else f", a byte-bigram model {self.bigram_loss:.3f}"
        skipped = f", {outcome.skipped} steps skipped (loss or gradient not finite)"
        return (
            f"validation loss {loss} {self.unit}{beside}; {self.step} steps"
            f"{skipped if outcome.skipped else ''}, peak memory {self.most_gib:.2f} GiB per process"
        )
