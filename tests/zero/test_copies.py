"""Copies of a model that ZeroOptimizer has: whole, free of hooks that do anything, and not changed
by its steps."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from pyops.zero import ZeroConfig, ZeroOptimizer
from tests.zero.models import Net, mean_loss, part

pytestmark = pytest.mark.cpu_only


def _copied(rank: int, group: Any, stage: int) -> list[str]:
    model = Net(mixed=False)
    zero = ZeroOptimizer(model, torch.optim.SGD, ZeroConfig(stage=stage), group=group, lr=0.1)
    with zero.whole_parameters():
        values = {name: p.detach().clone() for name, p in model.named_parameters()}
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copies = {
            "deepcopy": copy.deepcopy(model),
            "average": torch.optim.swa_utils.AveragedModel(model).module,
            "file": torch.load(file, weights_only=False),
        }
    mean_loss(model, *part(0, rank, 2)).backward()
    zero.step()
    with zero.whole_parameters():
        moved = not torch.equal(model.first.weight, values["first.weight"])
    wrong = [] if moved else ["the model was not trained"]
    for kind, found in copies.items():
        if not all(torch.equal(p, values[name]) for name, p in found.named_parameters()):
            wrong.append(f"{kind}: other values")
        mean_loss(found, *part(1, 0, 1)).backward()  # by itself: the other rank has no part in it
        if found.first.weight.grad is None or not found.first.weight.grad.abs().max() > 0:
            wrong.append(f"{kind}: no gradient")
    return wrong


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_copy_made_while_parameters_are_whole_is_a_model_of_its_own(world, stage: int):
    assert world(2).run(_copied, stage) == [[], []]
