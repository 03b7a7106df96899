"""[parallel] grid: the ranks of tp on a grid have the losses, norms and weights of one rank, and
any layout goes on with another's checkpoint."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import (
    Config,
    ConfigError,
    DistillConfig,
    ElasticConfig,
    OptimizerConfig,
    ParallelConfig,
    TaskConfig,
    ZeroConfig,
)
from pyops.train import train as train_alone
from pyops.train.report.metrics import read_rows
from pyops.train.sample_training import SampleTraining
from tests.grids import full
from tests.train import tiny_tasks
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
    digits = TaskConfig(kind="digits")
    for section, changed, message in (
        ("task", TaskConfig(kind="passages"), 'task.kind is "passages", but parallel.grid is "2d"'),
        (
            "train",
            dataclasses.replace(plain.train, num_sample_tokens=5),
            "train.num_sample_tokens is 5, .* keeps no keys and values",
        ),
        ("train", dataclasses.replace(plain.train, compile=True), "train.compile is true"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            dataclasses.replace(plain, parallel=parallel, **{section: changed})
    of_images = images(tmp_path)
    for section, changed, message in (
        ("task", dataclasses.replace(digits, model="coatnet"), 'task.model is "coatnet", .* a ViT'),
        ("task", dataclasses.replace(digits, pretrained="runs/a"), 'pretrained is "runs/a"'),
        ("optimizer", OptimizerConfig(name="lamb"), 'optimizer.name is "lamb", .* to "adamw"'),
        ("elastic", ElasticConfig(freeze="bound"), 'elastic.freeze is "bound", .* freezes nothing'),
        ("distill", DistillConfig(teacher="runs/a"), 'distill.teacher is "runs/a"'),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            dataclasses.replace(of_images, parallel=parallel, **{section: changed})


def test_heads_that_a_grid_does_not_divide_are_refused_on_every_rank(world, tmp_path):
    config = images(tmp_path, tp=4, grid="2d")
    config = dataclasses.replace(config, vit=dataclasses.replace(config.vit, num_heads=1))
    said = world(4).run(train_on_rank, config)
    assert len(set(said)) == 1
    assert "parallel.tp is 4: num_heads is 1, which the 2 ranks along 'column'" in said[0]


def images(folder: Any, *, name: str = "plain", steps: int = STEPS, **parallel: Any) -> Config:
    """A ViT on digits, in batches that no grid divides."""
    plain = tiny_tasks.config_of(folder, "digits", num_copies=1)
    options = {"folder": str(folder / "runs"), "device": "cpu", "plot": False, "tensorboard": False}
    return dataclasses.replace(
        plain,
        name=name,
        vit=dataclasses.replace(plain.vit, hidden=30, dropout=0.1, attention_dropout=0.1),
        data=dataclasses.replace(plain.data, validation_fraction=0.05),
        train=dataclasses.replace(plain.train, batch=29, num_steps=steps, **options),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3),
        parallel=ParallelConfig(**parallel),
    )


def scores(config: Config) -> list[float]:
    rows = read_rows(config.folder / "metrics.jsonl")
    return [row["validation_accuracy"] for row in rows if "validation_accuracy" in row]


def stop_in_step_3(rank: int, group: object, config: Config) -> Any:
    """Rank 0 is told to stop."""
    inner = SampleTraining.train_step

    def stopping(self: SampleTraining, share: Any, *, stop: bool = False) -> Any:
        if share.step == 3 and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, share, stop=stop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleTraining, "train_step", stopping)
        return train_on_rank(rank, group, config)


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ((4, 4, "2d"), (4, 4, "2.5d"), 7),
        full((4, 4, "2d"), (1, 1, "1d"), STEPS),
        full((1, 1, "1d"), (8, 8, "3d"), STEPS),
        full((8, 8, "2.5d"), (8, 4, "2d"), STEPS),
    ],
)
def test_a_vit_has_the_losses_of_one_process_and_goes_on_on_another_grid(
    world, tmp_path, before, after, steps
):
    plain = images(tmp_path, steps=steps)
    train_alone(plain)
    ranks, tp, grid = before
    config = images(tmp_path, name="grid", steps=steps, tp=tp, grid=grid)
    stopped = world(ranks).run(stop_in_step_3, config, timeout=TIMEOUT)
    assert {getattr(outcome, "stopped_by", outcome) for outcome in stopped} == {signal.SIGTERM}
    assert 3 <= len(losses(config)) < steps
    ranks, tp, grid = after
    again = images(tmp_path, name="grid", steps=steps, tp=tp, grid=grid)
    outcomes = world(ranks).run(train_on_rank, again, True, timeout=TIMEOUT)
    assert [getattr(each, "steps", each) for each in outcomes] == [steps] * ranks
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    assert 0.0 < scores(plain)[-1] <= 1.0  # which counts the held-out images once
    assert scores(config) == scores(plain)
    assert {each.accuracy for each in outcomes} == {scores(plain)[-1]}
    ours, theirs = last_state(config), last_state(plain)
    squares = [each["elastic"]["meter"]["squares"] for each in (ours, theirs)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-3)  # which counts each element once
    ours, theirs = ours["model"], theirs["model"]
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        found = ours[name]
        if name.endswith("qkv.bias"):
            # A key's bias adds the same to all scores of a row: its gradient is rounding alone,
            # which Adam makes steps of.
            found, tensor = (x.unflatten(0, (config.vit.num_heads, 3, -1)) for x in (found, tensor))
            assert max(x[:, 1].abs().max() for x in (found, tensor)) < 1e-2
            found, tensor = found[:, ::2], tensor[:, ::2]
        torch.testing.assert_close(
            found, tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def last_state(config: Config) -> dict[str, Any]:
    return load(config.folder / "checkpoints" / f"step-{config.train.num_steps:08}")[0]
