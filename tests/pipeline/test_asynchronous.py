"""Asynchronous runs of the executor against the papers' update rules, written down without schedule or pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyops.optim
from pyops.pipeline import Pipeline, Remedies, schedule
from tests.pipeline import emulation
from tests.pipeline.reference import batch, mlp

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "fused": lambda parameters: pyops.optim.AdamW(parameters, lr=0.02),
}
RULES: dict[str, tuple[str, dict[str, Any], Callable[[int], emulation.Rule]]] = {
    "stash": ("pipedream", {}, emulation.pipedream),
    "vertical": ("pipedream", {"vertical_sync": True}, emulation.vertical),
    "two": ("pipedream_2bw", {}, emulation.two_versions),
    "two, more": ("pipedream_2bw", {"accumulate": 5}, emulation.two_versions),
}


def rows_of(microbatches: int, rows: int) -> tuple[Tensor, Tensor, Any, Any]:
    x, target = batch(rows)
    return x, target, x.tensor_split(microbatches), target.tensor_split(microbatches)


def weights_of(layers: list[nn.Module]) -> list[Tensor]:
    return [p.detach().clone() for layer in layers for p in layer.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Bit for bit; and training has moved every one of them."""
    began = weights_of(mlp())
    assert all(not torch.equal(a, b) for a, b in zip(ours, began, strict=True))
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_stashed_versions_follow_their_papers_rule(rule: str, optimizer: str):
    name, options, make_rule = RULES[rule]
    for k in (1, 2, 3, 4):
        x, target, xs, targets = rows_of(4 * k + 3, 40)  # uneven micro-batches, and an uneven number for the last step
        plan = schedule(name, num_stages=k, num_microbatches=len(xs), **options)
        ours, theirs = mlp(), mlp()
        pipeline = Pipeline(ours, schedule=plan, loss=mse, optimizer=OPTIMIZERS[optimizer])
        pipeline.step(x, target)
        emulation.emulate(theirs, pipeline.boundaries, make_rule(k), OPTIMIZERS[optimizer], xs, targets,
                          accumulate=plan.options["accumulate"], loss=mse)  # fmt: skip
        assert same(weights_of(ours), weights_of(theirs)), k
        assert all(p.grad is None for p in pipeline.parameters())
        assert all(stage.kept == 0 for stage in pipeline.stages.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("warmup", ["a", "b"])
@pytest.mark.parametrize("decay", [None, math.exp(-2)])
def test_pipemare_follows_its_papers_rule(optimizer: str, warmup: str, decay: float | None):
    for k, accumulate, anneal in ((1, 1, 0), (3, 1, 0), (4, 1, 9), (2, 2, 0)):
        x, target, xs, targets = rows_of(24, 48)
        plan = schedule("pipemare", num_stages=k, num_microbatches=24, warmup=warmup, accumulate=accumulate)

        def in_flight(s: int, k: int = k) -> int:
            return k - s if warmup == "a" else 2 * (k - s) - 1

        ours, theirs = mlp(), mlp()
        pipeline = Pipeline(ours, schedule=plan, loss=mse, optimizer=OPTIMIZERS[optimizer],
                            remedies=Remedies(decay=decay, anneal=anneal))  # fmt: skip
        pipeline.step(x, target)
        emulation.pipemare(theirs, pipeline.boundaries, OPTIMIZERS[optimizer], xs, targets, loss=mse, in_flight=in_flight,
                           accumulate=accumulate, decay=decay, anneal=anneal)  # fmt: skip
        assert same(weights_of(ours), weights_of(theirs)), (k, accumulate)
