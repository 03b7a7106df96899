"""What a pipeline must compute, micro-batch by micro-batch in one piece; and the small models that
its tests run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.pipeline import Schedule

__all__ = ["batch", "mlp", "sequential_step"]


def mlp(layers: int = 8, *, width: int = 8, dropout: float = 0.0) -> list[nn.Module]:
    """Layers, the same ones at every call."""
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
        for _ in range(layers)
    ]


def batch(rows: int = 10, *, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets, the same ones at every call."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, width, generator=generator), torch.randn(
        rows, width, generator=generator
    )


def sequential_step(
    layers: Sequence[nn.Module],
    schedule: Schedule,
    boundaries: Sequence[int],
    x: Tensor,
    target: Tensor,
    loss: Callable[[Any, Any], Tensor],
) -> Tensor:
    """Forward and backward in one process, without a pipeline: each stage's gradients are added in
    the order in which the schedule's backwards (or weight gradients) come. The loss."""
    microbatches = schedule.num_microbatches
    xs, targets = x.tensor_split(microbatches), target.tensor_split(microbatches)
    parts: list[list[list[Tensor | None]]] = []
    total = torch.zeros(())
    parameters = [
        [p for layer in layers[a:b] for p in layer.parameters()]
        for a, b in itertools.pairwise(boundaries)
    ]
    for rows, wanted in zip(xs, targets, strict=True):
        y: Any = rows
        for layer in layers:
            y = layer(y)
        weighted = loss(y, wanted) * (len(rows) / len(x))
        total = total + weighted.detach()
        everything = [p for some in parameters for p in some]
        found = iter(torch.autograd.grad(weighted, everything, allow_unused=True))
        parts.append([[next(found) for _ in some] for some in parameters])
    for stage, some in enumerate(parameters):
        order = [
            a.number
            for a in schedule.ranks[schedule.rank_of[stage]]
            if a.stage == stage and a.kind in "BW"
        ]
        for i, p in enumerate(some):
            for number in order:
                gradient = parts[number][stage][i]
                if gradient is not None:
                    p.grad = gradient.clone() if p.grad is None else p.grad.add_(gradient)
    return total
