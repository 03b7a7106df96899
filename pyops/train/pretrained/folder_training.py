"""FolderTraining: the model of a Hugging Face folder learns the next tokens of a text, or what the
assistant says in instructions.

    one step:   rows -> trainer.step (any layout) -> metrics
    at the end: runs/<name>/model, a Hugging Face folder again

A loss is the mean, in nats, over the tokens that are learnt of all rows of a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyops.comm.agreement import gather
from pyops.config import Config, ConfigError, plan_for_run
from pyops.parallel import OptimizerGroups, no_decay_for_vectors
from pyops.train.host.ranks import StopRequest
from pyops.train.loop import Row, StepResult, Training, check_same_options, is_due
from pyops.train.pretrained.folder_data import FolderData
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.report.metrics import peak_memory_gib, plot_losses
from pyops.train.report.outcome import Outcome
from pyops.train.setup.recipe import make_mesh, optimizer_maker

__all__ = ["FolderTraining"]


class FolderTraining(Training):
    """A folder's model over text or instructions, on every layout."""

    def __init__(self, config: Config, *, device: torch.device) -> None:
        """Read the folder and the data, and share the model out.

        Raises:
            ConfigError, CorpusError: On every rank alike, for what the user can put right.
        """
        self.config, self.device, self.num_steps = config, device, config.train.num_steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.model = FolderModel.read(config.model_folder.folder)
        length = config.model_folder.sequence_length
        self.model.check_length(length, f"model.sequence_length is {length}", "make it smaller")
        self.mesh = make_mesh(config, device_type=device.type)
        self.data = FolderData(config, self.model, self.mesh)
        self.trainer = self.model.trainer(
            plan_for_run(config, num_rows=config.train.batch // self.mesh.size("dp")),
            optimizer=OptimizerGroups(optimizer_maker(config.optimizer), no_decay_for_vectors),
            mesh=self.mesh,
            seed=config.train.seed,
            device=device,
        )
        self._first_step = 0

    @property
    def step(self) -> int:
        """The number of steps that were taken, skipped ones too."""
        return self.trainer.num_steps

    def introduction(self) -> str:
        """What is trained, and on what, for the display."""
        num_ranks = math.prod(self.mesh.axes.degrees().values())
        text = (
            f"{self.model.num_parameters / 1e6:.2f} M parameters of {self.model.folder} on "
            f"{num_ranks} x {self.device.type}, {self.data.described()}"
        )
        if num_ranks > 1:
            sizes = {axis: self.mesh.size(axis) for axis in ("pp", "dp", "tp")}
            text += "\n" + " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1)
        staged = self.trainer.parts.staged
        return f"{text}; {staged.described}" if staged is not None else text

    def steps(self, request: StopRequest) -> Iterator[StepResult]:
        """Take one step after the other; see `Training.steps`."""
        options = self.config.train
        while not self.is_over:
            row, stop = self.train_step(stop=bool(request.number))
            last = self.is_over
            if last or is_due(self.step, options.validate_every):
                row["validation_loss"] = self.trainer.evaluate(self.data.validation())
            yield StepResult(
                row,
                tensorboard=last
                or "validation_loss" in row
                or is_due(self.step, options.log_every),
                save=stop or last or is_due(self.step, options.checkpoint_every),
                stop=stop and not last,
            )

    def train_step(self, *, stop: bool = False) -> tuple[Row, bool]:
        """Take one optimizer step.

        Args:
            stop: Whether this rank wants to stop.

        Returns:
            The metrics of the step, and whether any rank wants to stop.
        """
        started, step = time.perf_counter(), self.step
        lr = self.config.optimizer.lr_at(step, num_steps=self.num_steps)
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = lr
        batch, skipped = self.data.batches.next(), self.trainer.skipped
        loss = self.trainer.step({key: value.to(self.device) for key, value in batch.items()})
        taken = self.trainer.skipped == skipped
        stop = any(gather(stop))
        num_tokens = self.config.train.batch * batch["input_ids"].shape[1]
        scale = self.trainer.parts.optimizer.loss_scale
        row = {
            "step": step,
            "loss": loss if math.isfinite(loss) else None,
            "lr": lr,
            "grad_norm": self.trainer.grad_norm if taken else None,
            "tokens_per_s": num_tokens / (time.perf_counter() - started),
            "memory_gib": peak_memory_gib(self.device),
            "skipped": self.trainer.skipped,
            **({} if scale is None else {"loss_scale": scale.scale}),
        }
        return row, stop

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "step": self.step,
            "trainer": self.trainer.state_dict(),
            "data": self.data.batches.state_dict(),
            "recipe": self._recipe(),
        }

    def _recipe(self) -> dict[str, Any]:
        """What decides on which states there are."""
        return {
            "optimizer.name": self.config.optimizer.name,
            "precision.dtype": self.config.precision.dtype,
            **{f"{key} in config.json": value for key, value in self.model.fields.items()},
        }

    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint; see `Training.load_state`."""
        if "trainer" not in state:
            raise ConfigError(
                f"checkpoint {path} is of a run that trains no Hugging Face folder; leave "
                "model.folder out, or give this run another name"
            )
        check_same_options(path, self._recipe(), state["recipe"])
        self.data.batches.load_state_dict(state["data"])
        self.trainer.load_state_dict(state["trainer"])
        self._first_step = self.step

    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """Write the trained folder and a sample of text, draw the curve, say how it went; see
        `Training.finish`."""
        held_out = [row["validation_loss"] for row in rows if "validation_loss" in row]
        outcome = Outcome(
            self.step,
            held_out[-1] if held_out else None,
            None,
            self.trainer.skipped,
            stopped_by,
        )
        folder, options = self.config.folder, self.config.train
        written = self._first_step >= self.num_steps and any(
            gather((folder / "model" / "config.json").exists())
        )
        text = ""
        if not stopped_by and not written:
            self.trainer.save_pretrained(folder / "model")
            text = self.sample() if options.num_sample_tokens else ""
        notes: list[str] = []
        if self.rank:
            return outcome, notes
        picture = folder / "loss.png"
        if options.plot and plot_losses(
            picture, rows, bigram_loss=None, title=self.config.name, unit="nats per token"
        ):
            notes.append(f"loss curve: {picture}")
        if stopped_by:
            return outcome, notes
        if text:
            (folder / "sample.txt").write_text(text)
            notes.append(f"--- a sample ({folder / 'sample.txt'}) ---\n{text}\n---")
        notes.append(f"trained folder: {folder / 'model'}")
        return outcome, [*notes, self._summary(outcome)]

    def _summary(self, outcome: Outcome) -> str:
        loss = "none" if outcome.validation_loss is None else f"{outcome.validation_loss:.3f}"
        skipped = f", {outcome.skipped} steps skipped (loss or gradient not finite)"
        return (
            f"validation loss {loss} nats per token; {self.step} steps"
            f"{skipped if outcome.skipped else ''}, peak memory "
            f"{peak_memory_gib(self.device):.2f} GiB per process"
        )

    def sample(self) -> str:
        """The beginning of the first held-out row, continued by the model, the same on every
        rank. A collective."""
        prompt = self.data.prompt()
        room = self.config.model_folder.sequence_length - prompt.shape[1]
        tokens = self.trainer.generate(
            prompt.to(self.device),
            max_new_tokens=max(1, min(self.config.train.num_sample_tokens, room)),
            eos_token_id=self.model.eos_token_ids,
            temperature=1.0,
            seed=self.config.train.seed,
        )
        return self.model.tokenizer.decode(tokens[0].tolist())
