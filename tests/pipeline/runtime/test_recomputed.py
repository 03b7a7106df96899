"""Recomputation: which forwards run a second time, and how a layer can tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pyops.mesh import ALONE
from pyops.pipeline import Pipeline, schedule
from tests.pipeline.reference import batch

pytestmark = pytest.mark.cpu_only


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.stage = nn.Linear(8, 8), None
        self.calls = self.firsts = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.firsts += not self.stage.recomputing
        return self.linear(x)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb1p", "zbv"])
@pytest.mark.parametrize(("mode", "again"), [("never", 0), ("always", 5), ("except_last", 4)])
def test_forwards_run_twice_where_they_are_recomputed(name: str, mode: str, again: int):
    torch.manual_seed(0)
    layers = [Counts() for _ in range(4)]
    plan = schedule(name, num_stages=2, num_microbatches=5).with_recompute(mode)
    pipeline = Pipeline(layers, schedule=plan, group=ALONE, loss=nn.functional.mse_loss)
    for stage in pipeline.stages.values():
        for layer in stage.layers:
            layer.stage = stage
    pipeline.step(*batch(10))
    assert [layer.calls for layer in layers] == [5 + again] * 4
    assert [layer.firsts for layer in layers] == [5] * 4
    pipeline.step(*batch(10))
    assert [layer.firsts for layer in layers] == [10] * 4
