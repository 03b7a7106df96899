"""[parallel] grid: the ranks of tp on a grid have the losses, norms and weights of one rank, and
any layout goes on with another's checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pyops.config import Config, ConfigError, ParallelConfig, TaskConfig, ZeroConfig
from tests.grids import full
from tests.train.test_parallel import final_model
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only

TIMEOUT = 300.0  # seconds: blocks are many small messages, and processes share the cores


def on_grid(config: Config, name: str, *, tp: int, grid: str, stage: int = 0) -> Config:
    parallel = ParallelConfig(tp=tp, grid=grid)
    return dataclasses.replace(config, name=name, parallel=parallel, zero=ZeroConfig(stage))


def plain_run(folder: Any, **options: Any) -> Config:
    return config_of(folder, "cpu", name="plain", num_sample_tokens=0, **options)


@pytest.mark.parametrize(
    ("ranks", "tp", "grid", "stage"),
    [
        full(4, 4, "2d", 0),
        full(4, 4, "2.5d", 2),
        full(8, 4, "2d", 1),
        full(8, 4, "2d", 3),
        full(8, 8, "2.5d", 0),
        full(8, 8, "3d", 1),
    ],
)
def test_losses_norms_and_weights_are_those_of_one_rank(
    world, tmp_path, ranks, tp, grid, stage, reference
):
    plain = plain_run(tmp_path, dropout=0.1, micro_batch=4)
    config = on_grid(plain, "grid", tp=tp, grid=grid, stage=stage)
    plain = reference(plain)
    outcomes = world(ranks).run(train_on_rank, config, timeout=TIMEOUT)
    assert [outcome.steps for outcome in outcomes] == [STEPS] * ranks, outcomes
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    check_weights(config, plain)


def check_weights(config: Config, plain: Config) -> None:
    ours, theirs = final_model(config), final_model(plain)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        full((4, 4, "2d", 0), (1, 1, "1d", 0)),
        full((2, 2, "1d", 1), (4, 4, "2d", 1)),
        full((4, 4, "2d", 0), (8, 8, "3d", 1)),
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(world, tmp_path, before, after, reference):
    """The losses of the steps before, on the grid, and behind, from its checkpoint, are those of
    one rank; so are the weights at the end."""
    straight = plain_run(tmp_path, dropout=0.1)
    ranks, tp, grid, stage = before
    broken = on_grid(straight, "broken", tp=tp, grid=grid, stage=stage)
    straight = reference(straight)
    world(ranks).run(train_and_stop_rank_1, broken, timeout=TIMEOUT)
    assert len(losses(broken)) < STEPS
    ranks, tp, grid, stage = after
    again = on_grid(broken, "broken", tp=tp, grid=grid, stage=stage)
    if ranks == 1:
        train_on_rank(0, None, again, True)
    else:
        world(ranks).run(train_on_rank, again, True, timeout=TIMEOUT)
    assert same(losses(broken), losses(straight))
    check_weights(broken, straight)


def test_what_a_grid_does_not_go_with(tmp_path):
    for options, message in (
        ({"tp": 3, "grid": "2d"}, r"3 ranks are no square, .* nearest are 1 and 4"),
        ({"tp": 4, "grid": "4d"}, "grid is '4d'; it must be one of 1d, 2d, 2.5d, 3d"),
        ({"tp": 4, "grid": "2d", "pp": 2}, r"pp is 2, but a grid \(2d\) has no stages"),
        ({"tp": 4, "grid": "2d", "cp": 2}, "cp is 2, but a grid .* shares out whole sequences"),
        (
            {"tp": 4, "grid": "2d", "sequence_parallel": True},
            "sequence_parallel is true, .* set it to false, or grid to 1d",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelConfig(**options)
    plain = plain_run(tmp_path)
    parallel = ParallelConfig(tp=4, grid="2d")
    for section, changed, message in (
        ("task", TaskConfig(kind="digits"), 'task.kind is "digits", but parallel.grid is "2d"'),
        (
            "train",
            dataclasses.replace(plain.train, num_sample_tokens=5),
            "train.num_sample_tokens is 5, .* keeps no keys and values",
        ),
        ("train", dataclasses.replace(plain.train, compile=True), "train.compile is true"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            dataclasses.replace(plain, parallel=parallel, **{section: changed})
