"""check_step: whether a step fits the model that it will be given, before anything runs.

model --skeleton_of--> shapes alone --check_step 1--> shapes after it --check_step 2--> ...
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

from pyops.adapters.lora import check_adapters
from pyops.compress.steps import FinetuneStep, LayersStep, PruneStep, QuantizeStep, Step
from pyops.config import ConfigError
from pyops.distill import student_from_layers
from pyops.pruning import NM
from pyops.pruning.nm import check_pattern
from pyops.pruning.ranking.choice import prunable
from pyops.quantized.layers import chosen, matrix
from pyops.tensor_parallel import Ranks

__all__ = ["check_step", "skeleton_of"]

Model = TypeVar("Model", bound=nn.Module)


def skeleton_of(model: Model) -> Model:
    """A copy of a model whose parameters have shapes and no memory.

    Args:
        model: This rank's part of it.
    """
    bare = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=True)
        for p in model.parameters()
    }
    return copy.deepcopy(model, bare)  # type: ignore[arg-type]


def check_step(step: Step, skeleton: Model, ranks: Ranks) -> Model:
    """Refuse a step that does not fit the model that it will be given.

    Args:
        step: The step.
        skeleton: Of the model that it begins with, see `skeleton_of`.
        ranks: That share the layers.

    Returns:
        The skeleton of the model that it leaves.

    Raises:
        ConfigError: Naming what does not fit. Ranks may differ in it.
    """
    try:
        if isinstance(step, LayersStep) and step.keep:
            _check_keep(step, skeleton)
            skeleton = student_from_layers(skeleton, list(step.keep))
        if isinstance(step, FinetuneStep) and step.rank:
            check_adapters(skeleton, rank=step.rank, only=step.only or None)
        if isinstance(step, PruneStep):
            _check_prune(step, skeleton, ranks)
        if isinstance(step, QuantizeStep):
            _check_quantize(step, skeleton)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return skeleton


def _check_keep(step: LayersStep, skeleton: nn.Module) -> None:
    num_layers: int = skeleton.config.num_layers  # type: ignore[union-attr, assignment]
    if step.keep[-1] >= num_layers:
        raise ConfigError(
            f"keep is {list(step.keep)}, but the model has {num_layers} layers then, 0 to "
            f"{num_layers - 1}; name some of these"
        )


def _check_prune(step: PruneStep, skeleton: nn.Module, ranks: Ranks) -> None:
    if step.permute and ranks.size > 1:
        raise ConfigError(
            f"permute wants the whole model on a rank, and {ranks.size} share its layers; run it "
            "on one, or set permute to false"
        )
    names = prunable(skeleton, step.only or None)
    if step.pattern:
        n, _, m = step.pattern.partition(":")
        check_pattern(skeleton, NM(int(n), int(m)), list(names))


def _check_quantize(step: QuantizeStep, skeleton: nn.Module) -> None:
    group = step.group if step.weights == "int4" else 0
    for name, layer in chosen(skeleton, step.only or None).items():
        width = matrix(layer).shape[1]
        if group and width % group:
            fitting = ", ".join(str(g) for g in range(2, width + 1, 2) if width % g == 0)
            raise ConfigError(
                f"group is {group}, but {name} has {width} inputs on a rank; give one of "
                f"{fitting or 'none'}, or 0"
            )
