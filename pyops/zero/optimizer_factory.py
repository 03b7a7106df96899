"""OptimizerFactory: the inner optimizer of a ZeroOptimizer, before it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import ParamsT

from pyops.optim.fused.fused_optimizer import FusedOptimizer

__all__ = ["MakesOptimizer", "NoOptimizer", "OptimizerFactory"]

MakesOptimizer: TypeAlias = type[torch.optim.Optimizer] | Callable[..., torch.optim.Optimizer]


class NoOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer of a model that is not trained: no parameter, no state, no option.

    Args:
        params: Groups without parameters.
    """

    def __init__(self, params: ParamsT) -> None:
        super().__init__(params, {})


@dataclass(frozen=True)
class OptimizerFactory:
    """A class and its arguments, or a function that makes the optimizer of given parameters."""

    optimizer_class: type[torch.optim.Optimizer]
    """The class; for a function, that of the optimizer which it makes."""

    arguments: dict[str, Any]
    """Keyword arguments of the class, or of the function."""

    function: Callable[..., torch.optim.Optimizer] | None = None
    """None: the class is called."""

    @classmethod
    def of(cls, optimizer: MakesOptimizer | None, arguments: Mapping[str, Any]) -> OptimizerFactory:
        """The factory of what a user gave.

        Args:
            optimizer: a class, `functools.partial` of one, or a function of params (and
                `arguments`) that gives an optimizer; None for a model that is not trained.
            arguments: keyword arguments; they go before those of a partial.

        Raises:
            TypeError: `optimizer` is none of these.
        """
        if optimizer is None:
            return cls(NoOptimizer, dict(arguments))
        expected = (
            "pass the class itself, such as pyops.optim.AdamW, or a function that makes an "
            "optimizer of params, such as functools.partial(AdamW, lr=1e-3)"
        )
        if isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer):
            return cls(optimizer, dict(arguments))
        if isinstance(optimizer, partial) and not optimizer.args:
            return cls.of(optimizer.func, {**optimizer.keywords, **arguments})
        if isinstance(optimizer, type | torch.optim.Optimizer) or not callable(optimizer):
            raise TypeError(f"ZeroOptimizer: optimizer is {optimizer!r}; {expected}")
        trial = optimizer([nn.Parameter(torch.zeros(1))], **arguments)
        if not isinstance(trial, torch.optim.Optimizer):
            raise TypeError(
                f"ZeroOptimizer: optimizer is {optimizer!r}, which gives a "
                f"{type(trial).__name__}; {expected}"
            )
        return cls(type(trial), dict(arguments), optimizer)

    @property
    def trains(self) -> bool:
        """Whether anything is stepped."""
        return not issubclass(self.optimizer_class, NoOptimizer)

    def make(self, params: ParamsT, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
        """The optimizer of `params`, which may be groups. What `arguments` adds to those of a
        function is set afterwards, since a function need not take it."""
        if self.function is None:
            return self.optimizer_class(params, **arguments)
        made = self.function(params, **self.arguments)
        masters = arguments.get("master_weights", False)
        if masters and isinstance(made, FusedOptimizer) and not made.stochastic_rounding:
            made.master_weights = True
        return made
