"""A small network and its batch, cut into portions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyops.flat import FlatBuffer
from pyops.sandblaster import (
    Coordinator,
    LocalShards,
    SandblasterConfig,
    VectorShard,
    VirtualBatch,
    VirtualMember,
    Worker,
)

__all__ = ["ROWS", "begin", "loss_of", "network", "parameters_of"]

ROWS = 40


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    random = torch.Generator().manual_seed(3)
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4)).to(dtype)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 2)
    return net


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 6, generator=random).to(dtype)
    return x, torch.randn(ROWS, 4, generator=random).to(dtype)


def loss_of(portions: int, dtype: torch.dtype = torch.float64):
    """The loss of a portion, of which the sum is the mean over all rows."""
    x, y = batch(dtype)
    rows = torch.arange(ROWS).tensor_split(portions)

    def loss(net: nn.Module, portion: int) -> Tensor:
        here = rows[portion]
        return (net(x[here]) - y[here]).square().sum() / y.numel()

    return loss


def parameters_of(shards: LocalShards) -> Tensor:
    """The parameters that shards have arrived at, without the gaps between them."""
    points = torch.cat([shard.point for shard in shards.shards])
    model = network(points.dtype)
    buffer = FlatBuffer([(name, p) for name, p in model.named_parameters()])
    buffer.data.copy_(points)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def begin(
    config: SandblasterConfig,
    *,
    shards: int = 2,
    workers: tuple[VirtualMember, ...] = (VirtualMember(),),
    dtype: torch.dtype = torch.float64,
) -> tuple[Coordinator, LocalShards, VirtualBatch]:
    worker = Worker(network(dtype), loss_of(config.portions, dtype))
    held = LocalShards(
        [
            VectorShard(part, history_size=config.history_size, leaves=config.portions)
            for part in worker.parts(shards)
        ]
    )
    evaluate = VirtualBatch(held, worker.compute, workers, config)
    return Coordinator(held, evaluate, config), held, evaluate
