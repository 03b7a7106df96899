"""TextTraining: a GPT learns the next tokens of a text, from its first values on.

    one step:   rows -> forward -> loss -> backward --buckets, all-reduce--> optimizer -> metrics

The loss of a micro-batch is divided by the tokens of the global batch before backward, and
gradients are summed over ranks and micro-batches, so nothing is divided afterwards. Losses are
reported in nats per byte of text, or per token of files of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyops.config import Config, ConfigError
from pyops.mesh import Mesh
from pyops.models import sample
from pyops.train.loop import Row, check_same_options, refuse_folder_checkpoint
from pyops.train.report.display import describe_memory
from pyops.train.report.metrics import StepMemory
from pyops.train.report.outcome import Outcome
from pyops.train.report.traffic import Traffic
from pyops.train.setup.averaged import Averaged
from pyops.train.setup.downpour import Downpour
from pyops.train.setup.gpt_layers import HeadLoss
from pyops.train.setup.planned import Planned
from pyops.train.setup.recipe import is_planned, make_mesh, make_model, num_parameters
from pyops.train.setup.replicated import Replicated
from pyops.train.setup.strategy import Strategy
from pyops.train.setup.text_data import RunText, TextData
from pyops.train.setup.token_files import PythonData, TokenData
from pyops.train.token_training import TokenTraining

__all__ = ["TextTraining"]

DATA: dict[str, Callable[[Config, Mesh], RunText]] = {
    "text": TextData,
    "tokens": TokenData,
    "python": PythonData,
}
PROMPT_TOKENS = 64  # of the first held-out sequence, which the sample continues


class TextTraining(TokenTraining):
    """A GPT over text, on every layout: mesh, data, model, strategy, in this order."""

    inputs, unit, last_file = "tokens_BT", "nats per byte", "sample.txt"

    def __init__(self, config: Config, *, device: torch.device) -> None:
        """Make the model with its first values, and all that a step needs.

        Raises:
            ConfigError, CorpusError: On every rank alike, for what the user can put right.
        """
        self.config, self.device, self.num_steps = config, device, config.train.num_steps
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.mesh = make_mesh(config, device_type=device.type)
        self.data = DATA[config.data.kind](config, self.mesh)
        self.bigram_loss, self.unit = self.data.bigram_loss, self.data.unit
        self.model = make_model(config, self.mesh, device=device)
        self.num_parameters = num_parameters(self.model)
        self.strategy, sent = self._make_strategy()
        self.trainer = self.strategy.trainer
        self.optimizer = self.trainer.optimizer
        self.traffic = Traffic(
            self.strategy.communicator, numel=sent, window=config.train.log_every
        )
        self.lr_at = lambda step: config.optimizer.lr_at(step, num_steps=self.num_steps)

    def _make_strategy(self) -> tuple[Strategy, int]:
        """Where parameters and states lie; and of how many parameters a rank reduces gradients."""
        config, mesh, num_elements = self.config, self.mesh, self.num_parameters
        loss = HeadLoss(self.data.tokenizer)
        if config.asynchronous.on:
            replica = Downpour if config.asynchronous.method == "downpour" else Averaged
            return replica(config, self.model, group=mesh.group("dp"), loss=loss), 0
        if not is_planned(config):
            found = Replicated(config, self.model, group=mesh.group("dp"), loss=loss)
            return found, num_elements
        planned = Planned(
            config,
            self.model,
            mesh,
            loss=loss,
            num_rows=self.data.num_rows,
            device=self.device,
        )
        share = num_elements // config.parallel.tp
        return planned, planned.num_elements if config.parallel.pp > 1 else share

    def introduction(self) -> str:
        """What is trained, and on what, for the display."""
        return self.on_layout(
            f"{self.num_parameters / 1e6:.2f} M parameters",
            self.data.described,
            self.strategy.described,
        )

    def take_step(self, *, stop: bool) -> tuple[Row, bool, str]:
        """As `train_step`; and after the first one, which made the optimizer's states, a line on
        what memory there is for what."""
        if self.step != self._first_step + 1:
            return super().take_step(stop=stop)
        # StepMemory sets the mark of the process's peak back.
        self.peak_gib = self.most_gib
        with StepMemory(self.device) as memory:
            row, stop = self.train_step(stop=stop)
        return row, stop, describe_memory(self.strategy.memory(), taken=memory.taken)

    def next_batch(self) -> Mapping[str, Any]:
        """See `TokenTraining.next_batch`."""
        return self.data.next(self.device)

    def validation(self) -> Iterator[Mapping[str, Any]]:
        """See `TokenTraining.validation`."""
        return self.data.validation(self.device)

    def replicated(self) -> Mapping[str, torch.Tensor]:
        """See `TokenTraining.replicated`."""
        if self.config.zero.stage == 3:
            return {}
        return dict(self.strategy.model.named_parameters())

    def sent(self) -> Row:
        """Bytes that this rank sent in the last step."""
        return {**self.traffic.step(), **self.strategy.metrics()}

    def finish(self, rows: Sequence[Row], *, stopped_by: int) -> tuple[Outcome, list[str]]:
        """See `Training.finish`."""
        outcome = super().finish(rows, stopped_by=stopped_by)
        self.strategy.close()
        return outcome

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {
            "step": self.step,
            "skipped": self.trainer.skipped,
            "model_config": asdict(self.config.model),
            "precision": self.config.precision.dtype,
            "loss_scale": self.strategy.loss_scale.state_dict(),
            "data": self.data.batches.state_dict(),
            "recipe": self._recipe(),
            **self.strategy.state(),
        }

    def _recipe(self) -> dict[str, str]:
        """The options that decide which states there are."""
        return {
            "optimizer.name": self.config.optimizer.name,
            "communication.codec": self.config.communication.codec,
            "asynchronous.method": self.config.asynchronous.method,
        }

    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint; see `Training.load_state`."""
        refuse_folder_checkpoint(path, state)
        if "elastic" in state:
            raise ConfigError(
                f"checkpoint {path} is of a run over numbered samples, of task.kind "
                f"{state['task']['kind']!r}, but this one is over text in which nothing is frozen; "
                "set task.kind and elastic.freeze as they were, or give this run another name"
            )
        check_same_options(
            path,
            {
                **{f"model.{key}": value for key, value in asdict(self.config.model).items()},
                "precision.dtype": self.config.precision.dtype,
                **self._recipe(),
            },
            {
                **{f"model.{key}": value for key, value in state["model_config"].items()},
                "precision.dtype": state["precision"],
                **state.get("recipe", {}),
            },
        )
        self.data.batches.load_state_dict(state["data"])
        self.strategy.load(state)
        self.trainer.num_steps = self._first_step = state["step"]
        self.trainer.skipped = state["skipped"]
        if "loss_scale" in state:  # runs of the first versions had none
            self.strategy.loss_scale.load_state_dict(state["loss_scale"])

    def sample(self) -> str:
        """The beginning of the first held-out sequence, continued by the model; "" on ranks that
        have other models. All ranks call it."""
        with self.strategy.whole(), self.model.whole_rows():
            if self.mesh.rank("dp"):
                return ""  # the ranks that share a model with rank 0 help it
            tokens = sample(
                self.strategy.speaking(),
                self.data.prompt(PROMPT_TOKENS).to(self.device),
                num_tokens=self.config.train.num_sample_tokens,
                context=self.config.model.sequence_length,
                seed=self.config.train.seed,
            )
        return self.data.decode(tokens)
