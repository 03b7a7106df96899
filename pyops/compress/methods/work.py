"""Work: a model on its way through the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pyops.compress.learning import adamw, learn
from pyops.compress.steps import Step
from pyops.compress.text import Batch, Texts
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
    facts: Facts = field(default_factory=dict)
    """What the last step had to say."""

    def learn(self, step: Step, loss_of: Callable[[Batch], Tensor]) -> Facts:
        """All parameters that require gradients learn. A collective of the ranks.

        Args:
            step: How long, and at what rate.
            loss_of: The loss of a batch.
        """
        optimizer = adamw((p for p in self.model.parameters() if p.requires_grad), step)
        return dict(
            learn(
                self.model,
                self.texts,
                step,
                loss_of=loss_of,
                optimizer=optimizer,
                ranks=self.ranks,
            )
        )
