"""Where parameters, gradients and optimizer states lie, as `[zero]` and `[parallel]` say; the loop
sees no difference.

    stage parameters gradients  states     made by
    0     every rank every rank every rank Replicated: DataParallel and an optimizer over its flat
                                           buffers; with [parallel] tp or pp, Planned
    1     every rank every rank shared out Planned: `pyops.parallel.parallelize`
    2     every rank shared out shared out
    3     shared out shared out shared out

Checkpoints name parameters, whatever the strategy that wrote them: each reads all others'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from pyops.comm.collectives.communicator import Communicator
from pyops.precision import LossScale

__all__ = ["Strategy", "TokenTrainer"]


class TokenTrainer(Protocol):
    """What a run asks of what takes its steps: of `pyops.parallel.Trainer`, say."""

    num_steps: int
    skipped: int
    grad_norm: float | None
    vote: bool

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose learning rates the run sets."""
        ...

    @property
    def loss_scale(self) -> LossScale | None:
        """None where gradients need none."""
        ...

    def step(self, batch: Mapping[str, Any], *, vote: bool = False) -> float:
        """Take one optimizer step with all ranks; the mean loss."""
        ...

    def evaluate(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """The mean loss of all ranks' batches."""
        ...


class Strategy(ABC):
    """`trainer` takes the steps of `model`, `communicator` counts what is sent for gradients and
    parameters (None: nothing is), `loss_scale` stays at 1 where gradients need none."""

    model: nn.Module
    trainer: TokenTrainer
    communicator: Communicator | None
    loss_scale: LossScale
    described: str = ""
    """What there is to say of the stages of a pipeline."""

    def whole(self) -> AbstractContextManager[None]:
        """Within it, which all ranks enter, the ranks of one copy can run `speaking`."""
        return nullcontext()

    def speaking(self) -> nn.Module:
        """The model as `pyops.models.sample` takes it: tokens [1, T] -> logits, the last of which
        are of the last token. The ranks that share a copy call it alike."""
        return self.model

    def metrics(self) -> dict[str, float]:
        """What metrics.jsonl has of the last step besides the rest."""
        return {}

    def close(self) -> None:
        """End what goes on beside the steps. A collective, at the end of the run."""
        return

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
