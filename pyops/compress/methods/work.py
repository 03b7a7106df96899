"""Work: a model on its way through the steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.agreement import gather
from pyops.compress.learning import adamw, learn
from pyops.compress.steps import Step
from pyops.compress.text import Batch, Texts
from pyops.flat import Placement
from pyops.pruning import Masks, hold
from pyops.tensor_parallel import Ranks

__all__ = ["Facts", "Work"]

Facts = dict[str, Any]
"""What a step has to say, for the report."""


@dataclass
class Work:
    """A model on its way through the steps."""

    model: Any
    """The GPT as the steps so far have left it: this rank's part of it, in eval mode."""
    teacher: nn.Module | None
    """The model of the folder in; None where no step asks it."""
    texts: Texts
    """To learn from, and to be scored on."""
    ranks: Ranks
    """That share the layers."""
    masks: Masks | None = None
    """Of what is pruned; None: nothing is."""
    sparsity: float = 0.0
    """That the last step that pruned was asked for; 0 of a pattern."""
    facts: Facts = field(default_factory=dict)
    """What the last step had to say."""

    def learn(
        self,
        step: Step,
        loss_of: Callable[[Batch], Tensor],
        *,
        optimizer: torch.optim.Optimizer | None = None,
        after: Callable[[int], None] | None = None,
    ) -> Facts:
        """All parameters that require gradients learn, and what is pruned stays 0. A collective of
        the ranks.

        Args:
            step: How long, and at what rate.
            loss_of: The loss of a batch.
            optimizer: Of what learns; None: it is made.
            after: Called with 0, 1, ... after each step.
        """
        if optimizer is None:
            optimizer = adamw((p for p in self.model.parameters() if p.requires_grad), step)
        held = nullcontext() if self.masks is None else hold(self.masks, optimizer)
        with held:
            found = learn(
                self.model,
                self.texts,
                step,
                loss_of=loss_of,
                optimizer=optimizer,
                ranks=self.ranks,
                after=after,
            )
        return dict(found)

    @property
    def num_pruned(self) -> int:
        """Weights of the whole model that are pruned. A collective of the ranks."""
        if self.masks is None:
            return 0
        places, own = Placement.of(self.model), 0
        for name, mask in self.masks.items():
            place = places.get(name)
            if place.first if place is not None else self.ranks.rank == 0:
                own += mask.numel - mask.kept
        return sum(gather(own, group=self.ranks.group))

    def check_masks(self) -> None:
        """Raise RuntimeError where a pruned weight is not 0."""
        for name, mask in (self.masks or {}).items():
            weight = self.model.get_parameter(name).detach()
            if bool((weight[~mask.alive().to(weight.device)] != 0).any()):
                raise RuntimeError(f"{name} has pruned weights that are not 0")

    def release_masks(self) -> None:
        """Forget which weights are pruned; they are 0 still."""
        if self.masks is not None:
            self.masks.release()
        self.masks = None
