"""A pipeline runs what pack may answer with: a stage of frozen layers alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pyops.pipeline import Pipeline, PipelineConfig, schedule
from tests.elastic.flat import pack

pytestmark = pytest.mark.cpu_only


def _step(rank: int, group: dist.ProcessGroup | None) -> list[tuple[bool, float]]:
    """Of each layer here, whether it has a gradient, and how far that is from one process' without
    a pipeline."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    x, target = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    y = x
    for layer in layers:
        y = layer(y)
    (wanted,) = torch.autograd.grad(nn.functional.mse_loss(y, target), [layers[3].weight])
    packing = pack([4.0, 4.0, 4.0, 1.0], frozen=2, stages=2, lambda_frozen=1.0, batch=8)
    assert packing.boundaries[1] <= 2, "the first stage learns something, and this test nothing"
    plan = schedule("1f1b", num_stages=packing.stages, num_microbatches=packing.micro_batches)
    pipeline = Pipeline(
        layers,
        schedule=plan,
        group=group,
        loss=nn.functional.mse_loss,
        config=PipelineConfig(boundaries=packing.boundaries),
    )
    pipeline.step(x, target)
    last = layers[3].weight.grad
    error = 0.0 if last is None else float((last - wanted).abs().max())
    return [
        (any(layer.weight.grad is not None for layer in layers[:2]), error),
        (last is not None and bool(last.abs().max() > 1e-3), 0.0),
    ]


def test_in_one_process():
    assert _step(0, None) == [(False, pytest.approx(0, abs=1e-15)), (True, 0.0)]


def test_on_two_ranks(world):
    first, second = world(2).run(_step)
    assert first == [(False, 0.0), (False, 0.0)]
    assert second == [(False, pytest.approx(0, abs=1e-15)), (True, 0.0)]
