"""FolderTraining: the model of a Hugging Face folder learns the next tokens of a text, or what the
assistant says in instructions.

    one step:   rows -> trainer.step (any layout) -> metrics
    at the end: runs/<name>/model, a Hugging Face folder again; with [adapter] runs/<name>/adapter

A loss is the mean, in nats, over the tokens that are learnt of all rows of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyops.config import AdapterConfig, Config, ConfigError, plan_for_run
from pyops.hub.pretrained import save_pretrained
from pyops.parallel import OptimizerGroups, Trainer, no_decay_for_vectors
from pyops.train.loop import check_same_options
from pyops.train.pretrained.changed_models import changed_model
from pyops.train.pretrained.folder_data import FolderData
from pyops.train.pretrained.folder_model import FolderModel
from pyops.train.pretrained.folder_teacher import leave_to_last_stage, loss_beside_teacher
from pyops.train.pretrained.folder_tokens import FolderTokens
from pyops.train.setup.recipe import make_mesh, optimizer_maker
from pyops.train.token_training import TokenTraining

__all__ = ["FolderTraining"]


class FolderTraining(TokenTraining):
    """A folder's model over text or instructions, on every layout."""

    trainer: Trainer
    inputs, unit, last_file = "input_ids", "nats per token", "model/config.json"

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
        rows = FolderData if config.data.kind == "text" else FolderTokens
        self.data: FolderData | FolderTokens = rows(config, self.model, self.mesh)
        loss = loss_beside_teacher(config, self.model, self.mesh, device=device)
        self.trainer = self.model.trainer(
            plan_for_run(config, num_rows=config.train.batch // self.mesh.size("dp")),
            optimizer=OptimizerGroups(optimizer_maker(config.optimizer), no_decay_for_vectors),
            mesh=self.mesh,
            seed=config.train.seed,
            device=device,
            changed=changed_model(config),
            loss=loss,
        )
        leave_to_last_stage(loss, self.trainer)
        if config.adapter.rank:
            self.last_file = "adapter/adapter_config.json"
        self.lr_at = lambda step: config.optimizer.lr_at(step, num_steps=self.num_steps)

    def introduction(self) -> str:
        """What is trained, and on what, for the display."""
        staged = self.trainer.parts.staged
        return self.on_layout(
            f"{self.model.num_parameters / 1e6:.2f} M parameters of {self.model.folder}",
            self.data.described(),
            "" if staged is None else staged.described,
        )

    def next_batch(self) -> Mapping[str, Any]:
        """See `TokenTraining.next_batch`."""
        return {key: value.to(self.device) for key, value in self.data.batches.next().items()}

    def validation(self) -> Iterator[Mapping[str, Any]]:
        """See `TokenTraining.validation`."""
        for batch in self.data.validation():
            yield {key: value.to(self.device) for key, value in batch.items()}

    def write_model(self) -> str:
        """Write the trained folder, or that of the adapters."""
        if self.config.adapter.rank:
            folder = self.config.folder / "adapter"
            self.trainer.save_pretrained(folder)
            return f"trained adapters: {folder}"
        folder = self.config.folder / "model"
        if self.config.distill.keep:
            with self.trainer.optimizer.whole_parameters():
                model = self.trainer.model
                save_pretrained(model, folder, mesh=self.mesh, tokenizer_from=self.model.folder)
        else:
            self.trainer.save_pretrained(folder)
        return f"trained folder: {folder}"

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
            **{f"adapter.{key}": value for key, value in asdict(self.config.adapter).items()},
            "distill.keep": self.config.distill.keep,
            **{f"{key} in config.json": value for key, value in self.model.fields.items()},
        }

    def load_state(self, state: Mapping[str, Any], path: Path) -> None:
        """Go on from a checkpoint; see `Training.load_state`."""
        if "trainer" not in state:
            raise ConfigError(
                f"checkpoint {path} is of a run that trains no Hugging Face folder; leave "
                "model.folder out, or give this run another name"
            )
        without = {f"adapter.{key}": value for key, value in asdict(AdapterConfig()).items()}
        without["distill.keep"] = ()
        check_same_options(path, self._recipe(), {**without, **state["recipe"]})
        self.data.batches.load_state_dict(state["data"])
        self.trainer.load_state_dict(state["trainer"])
        self._first_step = self.step

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
