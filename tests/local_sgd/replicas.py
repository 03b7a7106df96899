"""Small models, their data, and runs of replicas for the tests of this room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyops.local_sgd import LocalSGD, LocalSGDConfig
from pyops.local_sgd.virtual_time import VirtualReplica, run_replicas
from pyops.optim import SGD, AdamW

__all__ = ["batch", "copies", "model", "run", "train", "values"]


def model(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """Four layers of odd sizes; the values depend on the seed alone."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3))
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 2)
    return net.to(dtype)


def batch(replica: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(6, 5, generator=random)
    return x.to(dtype), torch.randn(6, 3, generator=random).to(dtype)


def train(net: nn.Module, optimizer: Any, replica: int, step: int) -> None:
    """One inner step on the replica's own batch."""
    x, y = batch(replica, step, next(net.parameters()).dtype)
    optimizer.zero_grad()
    (net(x) - y).square().mean().backward()
    optimizer.step()


def values(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def adam(net: nn.Module) -> Any:
    return AdamW(net.parameters(), lr=1e-2)


def sgd(net: nn.Module) -> Any:
    return SGD(net.parameters(), lr=0.1)


def run(
    size: int,
    config: LocalSGDConfig,
    steps: int,
    *,
    make: Callable[[nn.Module], Any] = adam,
    each: Callable[[VirtualReplica, LocalSGD, int], None] = lambda replica, outer, step: None,
    dtype: torch.dtype = torch.float32,
) -> list[tuple[list[Tensor], LocalSGD]]:
    """(parameters, LocalSGD) of each of `size` virtual replicas after so many steps."""

    def body(replica: VirtualReplica) -> tuple[list[Tensor], LocalSGD]:
        net = model(dtype=dtype, seed=replica.number)  # replica 0's values are taken by all
        optimizer = make(net)
        outer = LocalSGD(net, optimizer, config, group=replica.exchange)
        for step in range(1, steps + 1):
            train(net, optimizer, replica.number, step)
            outer.step()
            each(replica, outer, step)
        outer.finish()
        return values(net), outer

    found = run_replicas(size, body)
    assert all(each is not None for each in found)
    return found  # type: ignore[return-value]
