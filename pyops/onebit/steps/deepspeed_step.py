"""The step of DeepSpeed's 1-bit optimizers before their switch: Adam without bias correction, decay
inside the rate.

    m = beta1 m + (1 - beta1) g   v = beta2 v + (1 - beta2) g^2   p = p - lr (m / (sqrt(v) + eps) +
                                                                  wd p)

DeepSpeed 0.19.6, runtime/fp16/onebit/adam.py. It is here so that a run may be compared with, or
continued from, one of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyops.onebit.steps.frozen_variance_step import step_frozen
from pyops.ops.optimizers.grad_norm import squared_norm
from pyops.optim.fused.clip import gradient_factor
from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.optim.fused.memory_layout import is_dense

__all__ = ["step_uncorrected"]


Rows = list[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]


def _move_as_adam(group: dict[str, Any], rows: Rows) -> None:
    step_frozen(group, rows, eps=group["eps"], lr=group["lr"], weight_decay=group["weight_decay"])


def step_uncorrected(
    optimizer: FusedOptimizer, move: Callable[[dict[str, Any], Rows], None] = _move_as_adam
) -> bool:
    """Step every parameter that has a gradient, already reduced; False when one is not finite, and
    nothing has changed then.

    Args:
        move: Moves a group's parameters; a row is (parameter, m, v, state).
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not params:
        return True
    dense = [p.grad if is_dense(p.grad) else p.grad.contiguous() for p in params]
    factor, skip, optimizer._measured["grad_norm"] = gradient_factor(
        [squared_norm(dense)],
        max_norm=optimizer.max_grad_norm,
        grad_scale=getattr(optimizer, "grad_scale", None),
        found_inf=None,
        device=params[0].device,
    )
    if skip is not None and bool(skip):
        return False
    for group in optimizer.param_groups:
        beta1, beta2 = map(float, group["betas"])
        rows = []
        for p in group["params"]:
            if p.grad is None:
                continue
            state = optimizer.state[p]
            optimizer._complete(group, p, state)
            gradient = p.grad.float() if factor is None else p.grad.float() * factor
            state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            rows.append((p, state["exp_avg"], state["exp_avg_sq"], state))
        move(group, rows)
    if optimizer.zeroes_gradients:
        torch._foreach_zero_([p.grad for p in params])
    return True
