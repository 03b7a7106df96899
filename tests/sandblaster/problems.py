"""A small network whose batch is cut into portions, for the tests of Sandblaster."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["ROWS", "flat", "network", "portion_loss"]

ROWS = 45


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Parameters of 32 x 6, 32, 4 x 32 and 4 numbers: 448 with padding, for 1 to 4 shards."""
    random = torch.Generator().manual_seed(3)
    found = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    with torch.no_grad():
        for p in found.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 2)
    return found


def _rows(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(4)
    x, y = torch.randn(ROWS, 6, generator=random), torch.randn(ROWS, 4, generator=random)
    return x.to(dtype), y.to(dtype)


def portion_loss(portions: int, dtype: torch.dtype = torch.float64):
    """(model, portion) -> the share of a batch's mean loss, of rows cut into portions."""
    x, y = _rows(dtype)
    pieces = list(zip(x.tensor_split(portions), y.tensor_split(portions), strict=True))

    def loss(model: nn.Module, portion: int) -> Tensor:
        inputs, targets = pieces[portion]
        return (model(inputs) - targets).square().sum() / y.numel()

    return loss


def flat(model: nn.Module) -> Tensor:
    """The parameters in registration order."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
