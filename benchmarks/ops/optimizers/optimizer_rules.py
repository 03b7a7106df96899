"""SGD, Lion and Adagrad, and torch's ways to the same step."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.instruments.harness import Case
from benchmarks.ops.optimizers.parameter_lists import compare, parameters, twins
from pyops.optim import SGD, Adagrad, Lion

__all__ = ["RULES", "of_rule"]


class ForeachLion(torch.optim.Optimizer):
    """Lion in as few calls as torch has: six passes over lists of tensors."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.exp_avgs = [torch.zeros_like(p) for p in params]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        params, (beta1, beta2) = group["params"], group["betas"]
        grads = [p.grad for p in params]
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        update = torch._foreach_mul(self.exp_avgs, beta1)
        torch._foreach_add_(update, grads, alpha=1 - beta1)
        torch._foreach_sign_(update)
        torch._foreach_add_(params, update, alpha=-group["lr"])
        torch._foreach_lerp_(self.exp_avgs, grads, 1 - beta2)


# Our class, torch's (by rival), options, bytes per fp32 element.
RULES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int]] = {
    "SGD": (
        SGD,
        {
            "torch fused": partial(torch.optim.SGD, fused=True),
            "torch foreach": partial(torch.optim.SGD, foreach=True),
        },
        {"lr": 1e-2, "weight_decay": 0.1},
        12,
    ),
    "SGD momentum": (
        SGD,
        {
            "torch fused": partial(torch.optim.SGD, fused=True),
            "torch foreach": partial(torch.optim.SGD, foreach=True),
        },
        {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
        20,
    ),
    "Lion": (
        Lion,
        {"torch foreach": ForeachLion},
        {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1},
        20,
    ),
    "Adagrad": (
        Adagrad,
        {
            "torch fused": partial(torch.optim.Adagrad, fused=True),
            "torch foreach": partial(torch.optim.Adagrad, foreach=True),
        },
        {"lr": 1e-2, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        20,
    ),
}


def of_rule(
    name: str, rule: str, count: int, numel: int, *, device: torch.device, target: float | None
) -> Case:
    make, rivals_of_rule, options, state_bytes = RULES[rule]
    params = parameters([numel] * count, device=device)
    twin = twins(params)
    ours = make(params, **options)
    theirs = {
        rival: make_rival(twins(params), **options).step
        for rival, make_rival in rivals_of_rule.items()
    }
    judge = next(iter(rivals_of_rule.values()))(twin, **options)
    return Case(
        "optim",
        name,
        {"pyops": ours.step, **theirs},
        device=device,
        check=lambda: compare(params, twin, ours.step, judge.step),
        bytes_moved=state_bytes * count * numel,
        targets=dict.fromkeys(theirs, target) if target else {},
    )
