"""Asynchronous schedules, optimizers and the papers' rules that tests of several files compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pyops.optim
from pyops.pipeline import (
    Schedule,
    schedule,
)
from tests.pipeline import emulation
from tests.pipeline.reference import batch, mlp

mse = nn.functional.mse_loss
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "fused": lambda parameters: pyops.optim.AdamW(parameters, lr=0.02),
}
RULES: dict[str, tuple[str, dict[str, Any], Callable[[int], emulation.Rule]]] = {
    "stash": ("pipedream", {}, emulation.pipedream),
    "vertical": ("pipedream", {"vertical_sync": True}, emulation.vertical),
    "two": ("pipedream_2bw", {}, emulation.two_versions),
    "two, more": ("pipedream_2bw", {"accumulate": 5}, emulation.two_versions),
}


def microbatch_rows(microbatches: int, rows: int) -> tuple[Tensor, Tensor, Any, Any]:
    x, target = batch(rows)
    return x, target, x.tensor_split(microbatches), target.tensor_split(microbatches)


def weights_of(layers: list[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for layer in layers for p in layer.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Bit for bit; and training has moved every one of them."""
    began = weights_of(mlp())
    assert all(not torch.equal(a, b) for a, b in zip(ours, began, strict=True))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def made(name: str, k: int, m: int, **options: Any) -> Schedule:
    return schedule(name, num_stages=k, num_microbatches=m, **options)
