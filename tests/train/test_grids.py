"""[parallel] grid: the ranks of tp on a grid have the losses, norms and weights of one rank, and
any layout goes on with another's checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pyops.config import Config, ConfigError, ParallelConfig, ZeroConfig
from tests.grids import full
from tests.train.test_parallel import final_model
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only


def on_grid(config: Config, name: str, *, tp: int, grid: str, stage: int = 0) -> Config:
    parallel = ParallelConfig(tp=tp, grid=grid)
    return dataclasses.replace(config, name=name, parallel=parallel, zero=ZeroConfig(stage))


@pytest.mark.parametrize(
    ("ranks", "tp", "grid", "stage"),
    [(4, 4, "2d", 0), full(4, 2, "2.5d", 1)],
)
def test_losses_norms_and_weights_are_those_of_one_rank(
    world, tmp_path, ranks, tp, grid, stage, reference
):
    plain = config_of(
        tmp_path, "cpu", name="plain", dropout=0.1, micro_batch=4, num_sample_tokens=0
    )
    config = on_grid(plain, "grid", tp=tp, grid=grid, stage=stage)
    plain = reference(plain)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [outcome.steps for outcome in outcomes] == [STEPS] * ranks, outcomes
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    ours, theirs = final_model(config), final_model(plain)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
