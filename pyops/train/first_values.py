"""FirstValues: what the layers of a run begin with, one layer at a time, so that a rank needs memory for its own alone.

embedding     blocks.0 ... blocks.11     head
drawn by (seed, name), all of them
from a run that was trained before       stays as it was drawn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from pyops.checkpoint import Stored
from pyops.config import ConfigError

__all__ = ["FirstValues"]


class FirstValues:
    """`initialise` of `Elastic`: called with a layer of `model` and its name there.

    model: on the meta device, or not. draw: draws a module's own parameters, not its children's. weights: by name, in memory or
    in a checkpoint still; embedding and blocks begin with them, the head does not.
    ConfigError for a parameter that is not among the weights, or has another shape there.
    """

    def __init__(
        self, model: nn.Module, *, draw: Callable[[nn.Module], None], weights: Mapping[str, Tensor | Stored] | None = None
    ) -> None:  # fmt: skip
        self._draw, self._weights = draw, weights or {}
        for name, parameter in model.named_parameters() if weights is not None else ():
            if name.startswith("head."):
                continue
            if name not in self._weights:
                raise ConfigError(
                    f"the weights of task.pretrained have no {name}; give a run of the same model, with as many layers"
                )
            if (there := tuple(self._weights[name].shape)) != tuple(parameter.shape):
                raise ConfigError(
                    f"{name} is {there} in the weights of task.pretrained, but {tuple(parameter.shape)} here; give the model "
                    "the same sizes"
                )

    def forget_weights(self) -> None:
        """Once all layers have theirs: what is called later gets its other values from ranks or from a checkpoint."""
        self._weights = {}

    @torch.no_grad()
    def __call__(self, name: str, layer: nn.Module) -> None:
        """Fill it."""
        for module in layer.modules():
            self._draw(module)
        for own, parameter in layer.named_parameters() if name != "head" and self._weights else ():
            value = self._weights[f"{name}.{own}"]
            if isinstance(value, Stored):
                value.read_into(parameter)
            else:
                parameter.copy_(value)
