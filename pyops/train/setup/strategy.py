"""Where parameters, gradients and optimizer states lie, as `[zero] stage` says; the loop sees no
difference.

    stage parameters gradients  states     made of
    0     every rank every rank every rank DataParallel and an optimizer over its flat buffers; with
                                           [parallel] tp or pp, ZeroOptimizer
    1     every rank every rank shared out ZeroOptimizer
    2     every rank shared out shared out
    3     shared out shared out shared out

Checkpoints name parameters, whatever the strategy that wrote them: each reads all others'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.collectives.communicator import Communicator
from pyops.config import Config, ConfigError
from pyops.mesh import Mesh
from pyops.models import GPT
from pyops.train.setup.recipe import make_data_parallel, make_optimizer, make_zero
from pyops.train.setup.state import load_optimizer_state, optimizer_state, read

__all__ = ["Replicated", "Strategy", "Zero", "make_strategy"]


class Strategy(ABC):
    """`forward` runs the model, `optimizer` has step() and grad_norm, `communicator` counts what is
    sent (None: nothing is)."""

    forward: nn.Module
    optimizer: Any  # a torch.optim.Optimizer with grad_norm
    communicator: Communicator | None

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward adds gradients up without communicating."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forget them, for a step that is skipped."""

    def whole(self) -> AbstractContextManager[None]:
        """Within it, which all ranks enter, one rank alone can run the model."""
        return nullcontext()

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """{"model", "optimizer", "communication"}, by parameter name; tensors, or this rank's
        `Shard`s of them."""

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """{"parameters", "gradients", "states"}: bytes that this rank keeps."""

    @abstractmethod
    def load(self, state: Mapping[str, Any]) -> None:
        """Take up `state`, of any strategy; tensors may be on disk still. A collective.

        Raises:
            ConfigError: When it doesn't fit.
        """


class Replicated(Strategy):
    """Everything on every rank; gradients are reduced during backward."""

    def __init__(
        self, config: Config, model: nn.Module, *, group: dist.ProcessGroup | None
    ) -> None:
        self.model = model
        self.forward = self.parallel = make_data_parallel(config, model, group=group)
        self.optimizer = make_optimizer(config, self.parallel, group=group)
        self.communicator = self.parallel.reducer.communicator

    def no_sync(self) -> AbstractContextManager[None]:
        return self.parallel.no_sync()

    def drop_gradients(self) -> None:
        for buffer in self.parallel.flat:
            buffer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), **optimizer_state(self.optimizer, self.parallel)}

    def load(self, state: Mapping[str, Any]) -> None:
        state = read(
            {key: state[key] for key in ("model", "optimizer", "communication") if key in state}
        )
        self.model.load_state_dict(state["model"])
        load_optimizer_state(self.optimizer, self.parallel, state)

    def memory(self) -> dict[str, int]:
        states = [value for entries in self.optimizer.state.values() for value in entries.values()]
        return {
            "parameters": _bytes(
                [*self.model.parameters(), *(buffer.data for buffer in self.parallel.flat)]
            ),
            "gradients": _bytes(buffer.grad for buffer in self.parallel.flat),
            "states": _bytes(states),
        }


class Zero(Strategy):
    """Shared out over the ranks, by pyops.zero."""

    def __init__(self, config: Config, model: GPT, mesh: Mesh, *, device: torch.device) -> None:
        self.forward = model
        self.optimizer = self.zero = make_zero(config, model, mesh, device=device)
        self.communicator = self.zero.communicator

    def no_sync(self) -> AbstractContextManager[None]:
        return self.zero.no_sync()

    def drop_gradients(self) -> None:
        self.zero.zero_grad()

    def whole(self) -> AbstractContextManager[None]:
        return self.zero.whole_parameters()

    def state(self) -> dict[str, Any]:
        return {
            "model": self.zero.model_state_dict(),
            "optimizer": self.zero.state_dict()["state"],
            "communication": {"gradients": {}, "optimizer": {}},
        }

    def load(self, state: Mapping[str, Any]) -> None:
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
        return self.zero.memory()


def _bytes(tensors: Iterable[Any]) -> int:
    """Of the tensors' storages, each counted once."""
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if isinstance(t, Tensor)
    }
    return sum(storages.values())


def make_strategy(config: Config, model: GPT, mesh: Mesh, *, device: torch.device) -> Strategy:
    """The strategy that `config` asks for; it gives a model on the meta device its memory.

    Args:
        config: The run's configuration.
        model: What is trained; on the meta device, or on `device`.
        mesh: The ranks. Those of "dp" hold the same parts of the model and see other sequences,
            those of "tp" share its layers, those of "pp" have its other layers.
        device: Where the model's memory is.
    """
    if config.zero.stage or config.parallel.tp > 1 or config.parallel.pp > 1:
        return Zero(config, model, mesh, device=device)
    return Replicated(config, model, group=mesh.group("dp"))
