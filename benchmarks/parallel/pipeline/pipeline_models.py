"""The models of the pipeline bench: a GPT layer by layer, layers that cost nothing, and layers that
take time and no processor."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parallel.data.bench_data_parallel import Model

__all__ = ["SLEEP", "Sleeps", "Tiny", "gpt_layers", "token_loss"]

SLEEP = 5e-3  # seconds of a forward that sleeps; input and weight gradients as long


class Embedding(nn.Module):
    """The beginning of Model as a layer."""

    def __init__(self, whole: Model) -> None:
        super().__init__()
        self.tokens, self.positions = whole.tokens, whole.positions

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions.weight


def gpt_layers() -> list[nn.Module]:
    """The model of bench_data_parallel, layer by layer; the same weights at every call."""
    torch.manual_seed(0)
    whole = Model()
    return [Embedding(whole), *whole.blocks, nn.Sequential(whole.ln, whole.head)]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Tiny(nn.Module):
    """A layer that has next to nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SLEEP)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        time.sleep(2 * SLEEP)
        return g.clone()


class Sleeps(nn.Module):
    """A layer that takes time and no processor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return _Slept.apply(x * self.scale)  # type: ignore[no-any-return]
