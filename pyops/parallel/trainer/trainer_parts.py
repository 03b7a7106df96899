"""TrainerParts: what a trainer is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from pyops.mesh import Mesh
from pyops.parallel.fused_head import FusedHead
from pyops.parallel.losses import CountedLoss
from pyops.parallel.plan import ParallelPlan
from pyops.parallel.rows.shared_tokens import SharedTokens
from pyops.parallel.stages.layered_model import LayeredModel
from pyops.parallel.stages.staged_model import StagedModel
from pyops.zero import ZeroOptimizer

__all__ = ["TrainerParts"]


@dataclass(frozen=True)
class TrainerParts:
    """What `parallelize` has made; each part is usable by itself."""

    model: nn.Module
    """This rank's part of the model; with a pipeline that of its stages."""

    optimizer: ZeroOptimizer
    """Of this rank's parameters."""

    mesh: Mesh
    """The ranks."""

    plan: ParallelPlan
    """As given."""

    loss: CountedLoss
    """(sum, count) of rows."""

    staged: StagedModel | None
    """The pipeline; None without one."""

    head: FusedHead | None
    """Computes the loss with the last layer; None where the logits are needed."""

    save_folder: Callable[[Path], None]
    """Writes the model as a Hugging Face folder."""

    seed: int
    """Of the dropout."""

    layered: LayeredModel | None = None
    """What the model says of its layers, where it was written for several ranks."""

    tokens: SharedTokens | None = None
    """Cuts batches where ranks share out the tokens of rows; None where they do not, or where the
    model does it by itself."""

    @property
    def device(self) -> torch.device:
        """Where this rank's parameters lie."""
        return next(self.model.parameters()).device
