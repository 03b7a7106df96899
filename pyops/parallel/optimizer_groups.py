"""OptimizerGroups: an optimizer whose parameters learn differently, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["OptimizerGroups", "no_decay_for_vectors"]


@dataclass(frozen=True)
class OptimizerGroups:
    """What `parallelize` takes as optimizer where parameters differ in their options.

    optimizer = OptimizerGroups(partial(AdamW, lr=1e-5, weight_decay=0.1), no_decay_for_vectors)
    """

    make: Callable[..., torch.optim.Optimizer]
    """Makes the optimizer of groups of parameters; a class or a partial of one."""

    options_of: Callable[[str, nn.Parameter], Mapping[str, float]]
    """(name in the model, parameter) -> its options, such as {"weight_decay": 0.0}; {} where it has
    those that all have."""

    def __call__(self, params: Any, **options: Any) -> torch.optim.Optimizer:
        """As `make`."""
        return self.make(params, **options)

    def of(self, model: nn.Module) -> list[dict[str, Any]]:
        """The groups of the model's parameters that are trained, in an order that does not depend
        on theirs.

        Args:
            model: The whole one, or a part of it.
        """
        found: dict[tuple[tuple[str, float], ...], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                options = tuple(sorted(self.options_of(name, parameter).items()))
                found.setdefault(options, []).append(parameter)
        return [{**dict(options), "params": found[options]} for options in sorted(found)]


def no_decay_for_vectors(name: str, parameter: nn.Parameter) -> dict[str, float]:
    """Biases and the weights of norms are not decayed, matrices are.

    Args:
        name: Of the parameter.
        parameter: The parameter.
    """
    return {} if parameter.ndim >= 2 else {"weight_decay": 0.0}
