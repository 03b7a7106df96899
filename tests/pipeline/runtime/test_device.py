"""Pipelines in one process on the device under test: gradients against plain torch there, and
asynchronous steps that learn."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, schedule
from tests.pipeline.reference import batch, mlp

mse = nn.functional.mse_loss


@pytest.mark.parametrize("name", ["1f1b", "zb1p", "zbv"])
@pytest.mark.parametrize("recompute", ["never", "except_last"])
def test_gradients_are_plain_torchs(device: torch.device, name: str, recompute: str):
    x, target = (t.to(device) for t in batch(10))
    ours, theirs = (nn.Sequential(*mlp()).to(device) for _ in range(2))
    plan = schedule(name, num_stages=2, num_microbatches=4).with_recompute(recompute)
    pipeline = Pipeline(ours, schedule=plan, group=ALONE, loss=mse)
    assert pipeline.device.type == device.type
    loss = pipeline.step(x, target)
    expected = mse(theirs(x), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach().cpu())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert bool((p.grad != 0).any())
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def test_recomputation_draws_the_same_dropout(device: torch.device):
    x, target = (t.to(device) for t in batch(9))
    found = []
    for mode in ("never", "always"):
        layers = nn.Sequential(*mlp(dropout=0.5)).to(device)
        torch.manual_seed(5)
        plan = schedule("gpipe", num_stages=2, num_microbatches=3).with_recompute(mode)
        Pipeline(layers, schedule=plan, group=ALONE, loss=mse).step(x, target)
        found.append([p.grad for p in layers.parameters()])
    for a, b in zip(*found, strict=True):
        assert bool((a != 0).any())
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["pipedream", "pipedream_2bw", "pipemare"])
def test_asynchronous_steps_learn(device: torch.device, name: str):
    x = batch(64)[0].to(device)
    target = -x.tanh()
    layers = nn.Sequential(*mlp(2)).to(device)
    plan = schedule(name, num_stages=2, num_microbatches=32)
    pipeline = Pipeline(
        layers,
        schedule=plan,
        group=ALONE,
        loss=mse,
        optimizer=lambda some: torch.optim.SGD(some, lr=0.1),
    )
    losses = [float(pipeline.step(x, target)) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0], losses
