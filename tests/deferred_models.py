"""Small models whose weight gradients can be put off, and their gradients from whole and from split
backward passes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.deferred import Deferred
from pyops.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tests.tensor_parallel.shared_layers import configured

__all__ = ["Embedded", "Shared", "Twice", "assert_same_bits", "batches", "found", "split", "whole"]


class Twice(nn.Module):
    """A layer called twice, a weight tied to another layer's, a norm, a layer without bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.again, self.norm = nn.Linear(6, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.tied, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)
        self.tied.weight = self.again.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x).relu())
        x = x + self.norm(self.again(x)).tanh()
        return self.last(self.tied(x))


class Shared(nn.Module):
    """Two parallel linears, the second one called twice."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, sequence_parallel: bool = False
    ) -> None:
        super().__init__()
        options = {"group": group, "sequence_parallel": sequence_parallel, "std": 0.5}
        self.up, self.down = (
            configured(ColumnParallelLinear, 6, 8, name="up", **options),
            configured(RowParallelLinear, 8, 6, name="down", **options),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.down(self.up(x).tanh())).tanh())


class Embedded(nn.Module):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.out = (
            nn.Embedding(7, 5),
            nn.Linear(5, 5),
            nn.Linear(5, 7, bias=False),
        )
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.words(x)).tanh())


def batches(width: int = 6, count: int = 3) -> list[Tensor]:
    return [
        torch.randn(2, 5, width, generator=torch.Generator().manual_seed(i)).requires_grad_()
        for i in range(count)
    ]


def whole(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    for x in inputs:
        model(x).square().sum().backward()
    return found(model, inputs)


def split(model: nn.Module, inputs: list[Tensor], *, together: bool = False) -> list[Tensor]:
    """I then W for each input, or all I first."""
    queue, pieces = Deferred(model.parameters()), []
    for x in inputs:
        loss = model(x).square().sum()
        with queue.collecting():
            loss.backward()
        pieces += [queue.take()] if together else []
        if not together:
            queue.take().accumulate()
    for each in pieces:
        each.accumulate()
    return found(model, inputs)


def found(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """All gradients, of which none may be zero."""
    gradients = [
        p.main_grad if hasattr(p, "main_grad") and p.grad is None else p.grad
        for p in model.parameters()
    ]
    gradients += [x.grad for x in inputs if x.requires_grad]
    assert all(g is not None and g.abs().max() > 0 for g in gradients)
    return gradients


def assert_same_bits(first: list[Tensor], second: list[Tensor]) -> None:
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
