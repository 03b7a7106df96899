"""Small models and runs of virtual time that the tests of the parameter server share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pyops.optim import SGD, Adagrad
from pyops.parameter_server import DownpourConfig, VirtualTime, VirtualWorker

__all__ = ["adagrad", "gradient", "mean_loss", "model", "quadratic", "rows", "run", "sgd", "uneven"]


def model(seed: int = 3) -> nn.Module:
    """4 parameters' tensors of 9 x 17, 17, 17 x 5 and 5 numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 5))
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return found


def rows(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A minibatch of 6 rows, another one for each worker and step."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(6, 9, generator=generator), torch.randint(5, (6,), generator=generator)


def gradient(module: nn.Module, worker: int, step: int) -> None:
    """Backward of the cross entropy of a minibatch."""
    inputs, labels = rows(worker, step)
    functional.cross_entropy(module(inputs), labels).backward()


def sgd(lr: float) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    return lambda flat: SGD([flat], lr=lr)


def adagrad(lr: float) -> Callable[[nn.Parameter], torch.optim.Optimizer]:
    return lambda flat: Adagrad([flat], lr=lr)


def uneven(count: int, *, steps: int | None, seed: int = 0, **options: Any) -> list[VirtualWorker]:
    """Workers whose steps take from 0.5 to 1.5 seconds, each another time each step."""

    def seconds(worker: int) -> Callable[[int], float]:
        generator = torch.Generator().manual_seed(77 * seed + worker)
        drawn = (0.5 + torch.rand(512, generator=generator)).tolist()
        return lambda step: drawn[step % 512]

    return [VirtualWorker(seconds(w), latency=0.02, steps=steps, **options) for w in range(count)]


def run(
    workers: Sequence[VirtualWorker],
    optimizer: Any,
    *,
    fetch_every: int = 1,
    push_every: int = 1,
    fetch_delay: int = 1,
    **options: Any,
) -> VirtualTime:
    """A run of `model` to its end."""
    given = ("push_codec", "fetch_codec", "mean", "local_lr")
    config = DownpourConfig(
        fetch_every=fetch_every,
        push_every=push_every,
        fetch_delay=fetch_delay,
        **{n: options.pop(n) for n in given if n in options},
    )
    return VirtualTime(model, gradient, optimizer, workers, config=config, **options).run()


class quadratic(nn.Module):
    """curvature / 2 x^2 of one number, in float64."""

    def __init__(self, curvature: float = 1.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.curvature = curvature

    def forward(self) -> torch.Tensor:
        return 0.5 * self.curvature * (self.x**2).sum()


@torch.no_grad()
def mean_loss(module: nn.Module) -> float:
    """The mean loss over the minibatches of many workers and steps."""
    losses = []
    for worker in range(4):
        for step in range(20):
            inputs, labels = rows(worker, step)
            losses.append(float(functional.cross_entropy(module(inputs), labels)))
    return sum(losses) / len(losses)
