"""Parts of models to recompute, and what a run of them gives, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 12


class Part(nn.Module):
    """Two linear layers with dropout between; counts its forwards."""

    def __init__(self, width: int = WIDTH, probability: float = 0.4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(probability)
        self.forwards = 0

    def forward(self, x: Tensor, *, scale: float = 1.0, shift: Tensor | None = None) -> Tensor:
        self.forwards += 1
        y = x + self.down(self.dropout(torch.tanh(self.up(x)))) * scale
        return y if shift is None else y + shift


class Stack(nn.Module):
    """Parts one after the other, each called through `call(part, x)`."""

    def __init__(self, depth: int = 3, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(depth))
        self.call = call or (lambda part, x: part(x))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = self.call(part, x)
        return x


def run(model: nn.Module, x: Tensor, *, seed: int = 3) -> list[Tensor]:
    """Output, gradients of the input and of all parameters, and the first random numbers drawn
    afterwards."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    y = model(x * 1.5)  # an input that is no leaf
    y.square().mean().backward()
    gradients: list[Any] = [x.grad, *(p.grad for p in model.parameters())]
    assert all(g.abs().max() > 0 for g in gradients), "a zero gradient would prove nothing"
    return [y.detach(), *(g.clone() for g in gradients), torch.rand(3)]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs by {(a - b).abs().max()}"
