"""Asynchronous training in one process, as the papers write it: no schedule, no pipeline, only
indices of weights.

Every function of this file says by formula which weights of which stage a micro-batch meets, from
step t and stage s alone.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["emulate", "pipedream", "pipemare", "two_versions", "vertical"]

Rule = Callable[
    [int, int], int
]  # (step t, stage s) -> the number of the weights that its micro-batches meet


def pipedream(stages: int) -> Rule:
    """w^{t+1} = w^t - lr grad f(w_1^{t-n+1}, ..., w_n^t), n stages; before there are as many, the
    first."""
    return lambda t, s: max(0, t - (stages - 1 - s))


def vertical(stages: int) -> Rule:
    """w^{t+1} = w^t - lr grad f(w_1^{t-n+1}, ..., w_n^{t-n+1})."""
    return lambda t, s: max(0, t - (stages - 1))


def two_versions(stages: int) -> Rule:
    """W^{t+1} = W^t - lr grad f(W^{t-1})."""
    return lambda t, s: max(0, t - 1)


def emulate(
    layers: Sequence[nn.Module],
    boundaries: Sequence[int],
    rule: Rule,
    optimizer: Callable[[list[Tensor]], Any],
    xs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    accumulate: int = 1,
    loss: Callable[..., Tensor],
    forward: Callable[[list[nn.Sequential], Tensor], Tensor] = lambda stages, x: nn.Sequential(
        *stages
    )(x),
) -> None:
    """Train `layers` in place, one micro-batch after the other; backward meets the weights of
    forward."""
    stages = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(boundaries)]
    masters = [list(stage.parameters()) for stage in stages]
    optimizers = [optimizer(some) if some else None for some in masters]
    history = [[copy.deepcopy(stage)] for stage in stages]
    for t, start in enumerate(range(0, len(xs), accumulate)):
        group = range(start, min(start + accumulate, len(xs)))
        rows = sum(len(xs[m]) for m in group)
        met = [history[s][rule(t, s)] for s in range(len(stages))]
        leaves = [p for stage in met for p in stage.parameters()]
        for m in group:
            y = forward(met, xs[m])
            gradients = torch.autograd.grad(loss(y, targets[m]) * (len(xs[m]) / rows), leaves)
            for p, g in zip(itertools.chain(*masters), gradients, strict=True):
                p.grad = g if p.grad is None else p.grad + g
        for s, stage in enumerate(stages):
            if optimizers[s] is not None:
                optimizers[s].step()
                optimizers[s].zero_grad()
            history[s].append(copy.deepcopy(stage))


class TwoWeights(torch.autograd.Function):
    """tanh(x W^T + b), whose backward has other weights than its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, w_backward: Tensor) -> Tensor:
        y = torch.tanh(torch.addmm(b, x, w.t()))
        ctx.save_for_backward(x, y, w_backward)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y, w = ctx.saved_tensors
        g = torch.ops.aten.tanh_backward(g, y)  # g (1 - y^2), with the rounding of autograd
        return g @ w, (x.t() @ g).t(), g.sum(0), None


def pipemare(
    layers: Sequence[nn.Module],
    boundaries: Sequence[int],
    optimizer: Callable[[list[Tensor]], Any],
    xs: Sequence[Tensor],
    targets: Sequence[Tensor],
    *,
    loss: Callable[..., Tensor],
    in_flight: Callable[[int], int],
    accumulate: int = 1,
    decay: float | None = None,
    anneal: int = 0,
) -> list[Tensor]:
    """Train `layers`, each a Linear and a Tanh, in place: w_{t+1} = w_t - lr grad f(w_{t-tau}, u),
    u = w_t or, with decay, w_t - tau delta. in_flight(s): micro-batches between forward and
    backward at stage s. delta, of all parameters, at the end.
    """
    count = len(boundaries) - 1
    stages = [nn.Sequential(*layers[a:b]) for a, b in itertools.pairwise(boundaries)]
    masters = [list(stage.parameters()) for stage in stages]
    optimizers = [optimizer(some) for some in masters]
    history = [[[p.detach().clone() for p in some]] for some in masters]
    delta = [[torch.zeros_like(p) for p in some] for some in masters]

    def forward_version(
        m: int, s: int
    ) -> int:  # steps that were over when micro-batch m went forward
        return max(0, m - in_flight(s) + 1) // accumulate

    steps = -(-len(xs) // accumulate)
    for t in range(steps):
        group = range(t * accumulate, min((t + 1) * accumulate, len(xs)))
        rows = sum(len(xs[m]) for m in group)
        for m in group:
            y, leaves = xs[m], []
            for s in range(count):
                tau = t - forward_version(m, s)
                for i in range(0, len(masters[s]), 2):
                    w, b = (p.clone().requires_grad_() for p in history[s][t - tau][i : i + 2])
                    u = torch.add(
                        history[s][t][i], delta[s][i], alpha=-tau
                    )  # delta stays 0 without decay
                    leaves += [w, b]
                    y = TwoWeights.apply(y, w, b, u)
            gradients = torch.autograd.grad(loss(y, targets[m]) * (len(xs[m]) / rows), leaves)
            for p, g in zip(itertools.chain(*masters), gradients, strict=True):
                p.grad = g if p.grad is None else p.grad + g
        for s in range(count):
            tau = (
                in_flight(s) - 1
            ) / accumulate  # of a pipeline that is full, over all micro-batches of a step
            for group_of in optimizers[s].param_groups:
                base = group_of["lr"]
                if anneal:
                    group_of["lr"] = base * max(1.0, tau) ** (min(t / anneal, 1.0) - 1.0)
            optimizers[s].step()
            optimizers[s].zero_grad()
            for group_of in optimizers[s].param_groups:
                group_of["lr"] = base
            history[s].append([p.detach().clone() for p in masters[s]])
            if decay is not None and tau:
                gamma = decay ** (1 / tau)
                for d, new, old in zip(delta[s], history[s][-1], history[s][-2], strict=True):
                    d.copy_(torch.add(gamma * d, new - old, alpha=1 - gamma))
    return [d for some in delta for d in some]
