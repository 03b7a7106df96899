"""[parallel] tp cuts layers over ranks, with data parallelism and [zero]; losses, norms and
checkpoints stay as they are."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, OptimizerConfig, ParallelConfig, ZeroConfig
from tests.grids import full
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only


def cut(
    config: Config, name: str, *, tp: int, stage: int = 0, sequence_parallel: bool = False
) -> Config:
    return dataclasses.replace(
        config, name=name, parallel=ParallelConfig(tp, sequence_parallel), zero=ZeroConfig(stage)
    )


def final_model(config: Config) -> dict[str, torch.Tensor]:
    return load(config.folder / "checkpoints" / f"step-{STEPS:08}")[0]["model"]


@pytest.mark.parametrize(
    ("ranks", "tp", "stage", "sequence_parallel"),
    [full(2, 2, 0, False), full(4, 2, 1, True), full(4, 2, 2, False), (4, 2, 3, True)],
)  # without sequence parallelism the runs of the next test go on, with the losses of one process
def test_neither_losses_nor_norms_nor_weights_change(
    world, tmp_path, ranks, tp, stage, sequence_parallel, reference
):
    plain = config_of(tmp_path, "cpu", name="plain", dropout=0.1, micro_batch=2)
    config = cut(plain, "cut", tp=tp, stage=stage, sequence_parallel=sequence_parallel)
    plain = reference(plain)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [outcome.steps for outcome in outcomes] == [STEPS] * ranks, outcomes
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    assert losses(plain)[-1] < losses(plain)[0] - 0.8
    ours, theirs = final_model(config), final_model(plain)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert (config.folder / "sample.txt").read_text() == (plain.folder / "sample.txt").read_text()


# Layers are put together and cut in the last two; between stages in the last.
@pytest.mark.parametrize(
    ("before", "after"),
    [full((2, 2, 0), (1, 1, 0)), full((2, 1, 0), (2, 2, 1)), ((4, 2, 2), (2, 1, 3))],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(world, tmp_path, before, after, reference):
    straight = config_of(tmp_path, "cpu", name="straight")
    straight = reference(straight)
    ranks, tp, stage = before
    broken = cut(straight, "broken", tp=tp, stage=stage)
    world(ranks).run(train_and_stop_rank_1, broken)
    ranks, tp, stage = after
    world(ranks).run(train_on_rank, cut(broken, "broken", tp=tp, stage=stage), True)
    assert same(losses(broken), losses(straight))


def test_what_does_not_fit_is_said_before_anything_starts(world, tmp_path):
    config = cut(config_of(tmp_path, "cpu"), "run", tp=2)
    with pytest.raises(
        ConfigError,
        match=r"parallel.tp is 2, of which 3 ranks are no multiple; start a multiple of 2, "
        r"such as 2",
    ):
        config.check_ranks(3)
    with pytest.raises(ConfigError, match=r"train.batch is 8 sequences, which 3 ranks can't share"):
        config.check_ranks(6)
    with pytest.raises(
        ValueError, match=r"tp is 2, but optimizer.name 'onebit_adam'.* set parallel\.tp to 1"
    ):
        dataclasses.replace(config, optimizer=OptimizerConfig("onebit_adam"))
    with pytest.raises(
        ValueError,
        match=r"parallel.tp is 2, but optimizer.name 'lamb' goes by sums over each layer",
    ):
        dataclasses.replace(config, optimizer=OptimizerConfig("lamb"))
    for refusal in world(3).run(
        train_on_rank, cut(config_of(tmp_path, "cpu", batch=6), "run", tp=3)
    ):
        assert "parallel.tp is 3: " in refusal
        assert "heads" in refusal
    with pytest.raises(ValueError, match="tp is 0; it must be 1 or more"):
        ParallelConfig(0)
