"""The elementwise optimizers beside Adam, what each is judged by, and pairwise different options,
none of them a default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pyops.optim import SGD, Adagrad, Lion

__all__ = ["RULES", "PlainLion", "names"]


class PlainLion(torch.optim.Optimizer):
    """Lion in plain torch, as its authors wrote it: Chen et al., arXiv:2302.06675, algorithm 2."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = -p.grad if group["maximize"] else p.grad
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((m * beta1 + grad * (1 - beta1)).sign(), alpha=-group["lr"])
                m.mul_(beta2).add_(grad, alpha=1 - beta2)


# Name: our class, its judge, options, names of states.
RULES: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, ...]]] = {
    "sgd": (SGD, torch.optim.SGD, {"lr": 0.013, "weight_decay": 0.21}, ()),
    "momentum": (
        SGD,
        torch.optim.SGD,
        {"lr": 0.013, "momentum": 0.77, "dampening": 0.34, "weight_decay": 0.21},
        ("momentum_buffer",),
    ),
    "nesterov": (
        SGD,
        torch.optim.SGD,
        {"lr": 0.013, "momentum": 0.77, "nesterov": True, "weight_decay": 0.21},
        ("momentum_buffer",),
    ),
    "lion": (
        Lion,
        PlainLion,
        {"lr": 0.013, "betas": (0.77, 0.952), "weight_decay": 0.21},
        ("exp_avg",),
    ),
    "adagrad": (
        Adagrad,
        torch.optim.Adagrad,
        {
            "lr": 0.13,
            "lr_decay": 0.05,
            "weight_decay": 0.21,
            "initial_accumulator_value": 0.3,
            "eps": 3e-5,
        },
        ("sum",),
    ),
}


def names(*, torch_has: bool = False) -> list[str]:
    """The rules; those that torch has too."""
    return [
        name
        for name, (_, theirs, _, _) in RULES.items()
        if not torch_has or theirs is not PlainLion
    ]
