"""Layers and arguments that are unlike the usual ones: in place, of any number, losses that are
none, copies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, PipelineConfig, schedule
from tests.pipeline.reference import batch, mlp, sequential_step

pytestmark = pytest.mark.cpu_only

mse = nn.functional.mse_loss


def made(loss: Any = mse, layers: list[nn.Module] | None = None) -> Pipeline:
    return Pipeline(
        layers or mlp(),
        schedule=schedule("1f1b", num_stages=2, num_microbatches=2),
        group=ALONE,
        loss=loss,
    )


def in_place() -> list[nn.Module]:
    """Each stage begins with a layer that overwrites what it is given."""
    torch.manual_seed(1)
    return [
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.ELU(inplace=True),
        nn.Linear(8, 8),
    ]


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("boundaries", [[0, 4, 6], [0, 3, 6]])
def test_layers_may_work_in_place(mode: str, boundaries: list[int]):
    x, target = batch(9)
    given = x.clone()
    ours, theirs = in_place(), in_place()
    plan = schedule("1f1b", num_stages=2, num_microbatches=3).with_recompute(mode)
    pipeline = Pipeline(
        ours, schedule=plan, group=ALONE, loss=mse, config=PipelineConfig(boundaries=boundaries)
    )
    pipeline.step(x, target)
    assert torch.equal(x, given)
    sequential_step(theirs, plan, boundaries, given, target, mse)
    for a, b in zip(
        nn.Sequential(*ours).parameters(), nn.Sequential(*theirs).parameters(), strict=True
    ):
        assert bool((a.grad != 0).any())
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, t: y - t, r"the loss is a tensor \(5, 8\)"),
        (lambda y, t: 3.0, "the loss is a float"),
        (lambda y, t: (y - t).sum().detach(), "the loss requires no gradient"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str):
    with pytest.raises(ValueError, match=message):
        made(loss).step(*batch(10))


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no parameter of the model requires one"):
        made(layers=[layer.requires_grad_(False) for layer in mlp()]).step(*batch(10))
    assert made(layers=[nn.Tanh() for _ in range(4)])(*batch(10)) > 0


def test_names_that_no_layer_has():
    with pytest.raises(ValueError, match="no layer's forward names 'maks'; layers name input"):
        made().step(*batch(10), maks=torch.ones(10, 1))


def test_schedules_and_pipelines_are_copied():
    plan = schedule("zb1p", num_stages=3, num_microbatches=4).with_skips([(0, 2)])
    for other in (copy.deepcopy(plan), pickle.loads(pickle.dumps(plan))):
        assert other == plan
        assert other.transfers == plan.transfers
    pipeline = made(layers=[nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)])
    pipeline.step(*batch(10))
    other = copy.deepcopy(pipeline)
    other.step(*batch(10))
    assert [int(each.get_submodule("1").num_batches_tracked) for each in (pipeline, other)] == [
        1,
        2,
    ]
    for a, b in zip(pipeline.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)  # torch copies no gradients
