"""Planned: a GPT that `pyops.parallel.parallelize` shares out, as the sections of a run say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from pyops.config import Config, ConfigError, plan_for_run
from pyops.config.run_plan import with_keys_of_a_run
from pyops.mesh import Mesh
from pyops.models import GPT
from pyops.parallel import OptimizerGroups, Trainer, no_decay_for_vectors, parallelize
from pyops.parallel.losses import CountedLoss
from pyops.parallel.stages.staged_model import StagedModel
from pyops.precision import LossScale
from pyops.train.setup.gpt_layers import layers_of
from pyops.train.setup.recipe import optimizer_maker
from pyops.train.setup.strategy import Strategy

__all__ = ["Planned"]


class Planned(Strategy):
    """Layers, stages and states are shared out over the ranks."""

    def __init__(
        self,
        config: Config,
        model: GPT,
        mesh: Mesh,
        *,
        loss: CountedLoss,
        num_rows: int,
        device: torch.device,
    ) -> None:
        """Give the model its memory and first values. A collective.

        Args:
            config: The run's configuration.
            model: On the meta device, made with the mesh; afterwards this rank's part.
            mesh: The ranks. Those of "dp" hold the same parts of the model and see other sequences,
                those of "tp" share its layers, those of "pp" have its other layers.
            loss: Of a batch.
            num_rows: Of a batch, for each copy of the model.
            device: Where the model's memory is.

        Raises:
            ConfigError: On every rank alike, for a plan that does not fit the model.
        """
        seed = config.train.seed
        try:
            self.trainer: Trainer = parallelize(
                layers_of(model, seed=seed),
                plan_for_run(config, num_rows=num_rows),
                optimizer=OptimizerGroups(optimizer_maker(config.optimizer), no_decay_for_vectors),
                mesh=mesh,
                loss=loss,
                seed=seed,
                device=device,
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(with_keys_of_a_run(error)) from None
        self.model, self.zero = self.trainer.model, self.trainer.optimizer
        self.communicator = self.zero.communicator
        self.loss_scale = self.trainer.loss_scale or LossScale(initial=1.0)
        self._staged = self.trainer.parts.staged
        self.described = "" if self._staged is None else self._staged.described

    @property
    def num_elements(self) -> int:
        """Of the parameters that this rank and its copies have."""
        return sum(math.prod(shape) for flat in self.zero.flats for shape in flat.layout.shapes)

    def whole(self) -> AbstractContextManager[None]:
        """See `Strategy.whole`."""
        return self.zero.whole_parameters()

    def speaking(self) -> nn.Module:
        """See `Strategy.speaking`."""
        return self.model if self._staged is None else _Speaking(self.model, self._staged)

    def state(self) -> dict[str, Any]:
        """See `Strategy.state`."""
        return {
            "model": self.zero.model_state_dict(),
            "optimizer": self.zero.state_dict()["state"],
            "communication": {"gradients": {}, "optimizer": {}},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """See `Strategy.load`."""
        try:
            self.zero.load_model_state_dict(state["model"])
            self.zero.load_state_dict(
                {
                    "state": state["optimizer"],
                    "param_groups": self.zero.state_dict()["param_groups"],
                }
            )
        except ValueError as error:
            raise ConfigError(f"the checkpoint does not fit this configuration: {error}") from None

    def memory(self) -> dict[str, int]:
        """See `Strategy.memory`."""
        return self.zero.memory()


class _Speaking(nn.Module):
    """tokens [1, T] -> logits [1, 1, V] of the last one, from stages on several ranks."""

    def __init__(self, model: nn.Module, staged: StagedModel) -> None:
        super().__init__()
        self.model, self._staged = model, staged

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self._staged.logits({"tokens_BT": tokens_BT}, last=True)
