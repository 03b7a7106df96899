"""FirstValues: what the layers of a run begin with, one layer at a time, so that a rank needs
memory for its own alone.

embedding     blocks.0 ... blocks.11     head
drawn by (seed, name), all of them
from a run that was trained before       stays as it was drawn
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from pyops.checkpoint import CheckpointError, Checkpoints, LazyTensor, load
from pyops.comm.agreement import on_first_rank
from pyops.config import ConfigError
from pyops.train.tasks import Task

__all__ = ["FirstValues", "weights_of"]

HEADS = ("head.", "pooler.", "next_sentence.")  # what a model may have had above its blocks
SAME_DATA = {"masked_text", "passages"}  # tasks over one text, of which the same part is held out


def weights_of(folder: Path, *, task: Task) -> dict[str, LazyTensor]:
    """The model of a run's newest checkpoint, which stays on the disk.

    Raises:
        ConfigError: On every rank alike, where there is none, and where it may have learnt from
            what the task holds out.
    """
    latest = on_first_rank(Checkpoints(folder / "checkpoints").latest)
    if latest is None:
        raise ConfigError(
            f"task.pretrained is {str(folder)!r}, where no checkpoint is in "
            f"{folder / 'checkpoints'}; name the folder of a run "
            'that was trained before, or set it to ""'
        )
    try:
        state, _ = load(latest, lazy=True, compare=True)
    except CheckpointError as error:
        raise ConfigError(f"task.pretrained: {error}") from None
    kind = state.get("task", {}).get("kind")
    if {kind, task.name} <= SAME_DATA and state.get("data") != task.digest:
        raise ConfigError(
            f"task.pretrained is {str(folder)!r}, a run over other text, or another "
            "split of it, which may have learnt what is "
            "held out here; train it anew, with the same [data]"
        )
    weights: dict[str, LazyTensor] = state["model"]
    return weights


class FirstValues:
    """`ElasticCallbacks.initialize` of `Elastic`: called with a layer of `model` and its name.

    Args:
        model: On the meta device, or not.
        draw: Draws a module's own parameters, not its children's.
        weights: By name, in memory or in a checkpoint still; embedding and blocks begin with them,
            the head does not.

    Raises:
        ConfigError: For a parameter that is not among the weights, or has another shape there, and
            for weights that the model lacks.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        draw: Callable[[nn.Module], None],
        weights: Mapping[str, Tensor | LazyTensor] | None = None,
    ) -> None:
        self._draw, self._weights = draw, weights or {}
        own = dict(model.named_parameters())
        for name in self._weights:
            if name not in own and not name.startswith(HEADS):
                raise ConfigError(
                    f"the weights of task.pretrained have {name}, which this model "
                    "lacks; give a run of the same model"
                )
        for name, parameter in own.items() if weights is not None else ():
            if name.startswith("head."):
                continue
            if name not in self._weights:
                raise ConfigError(
                    f"the weights of task.pretrained have no {name}; give a run of the "
                    "same model, with as many layers"
                )
            if (there := tuple(self._weights[name].shape)) != tuple(parameter.shape):
                raise ConfigError(
                    f"{name} is {there} in the weights of task.pretrained, but "
                    f"{tuple(parameter.shape)} here; give the model "
                    "the same sizes"
                )

    def forget_weights(self) -> None:
        """Once all layers have theirs: what is called later gets its other values from ranks or
        from a checkpoint."""
        self._weights = {}

    @torch.no_grad()
    def __call__(self, name: str, layer: nn.Module) -> None:
        """Fill it."""
        for module in layer.modules():
            self._draw(module)
        for own, parameter in layer.named_parameters() if name != "head" and self._weights else ():
            value = self._weights[f"{name}.{own}"]
            if isinstance(value, LazyTensor):
                value.read_into(parameter)
            else:
                parameter.copy_(value)
