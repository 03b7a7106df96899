"""[parallel] pp puts layers on ranks, with tp, dp and [zero]; losses, norms, weights and samples
stay as they are."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, OptimizerConfig, PrecisionConfig, ZeroConfig
from pyops.config.parallel_config import ParallelConfig
from pyops.train import TextTraining, TrainingLoop, train
from pyops.train.report.metrics import read_rows
from pyops.zero.hooks.sharded_gradients import ReduceScatterBucket
from tests.grids import full
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only


def cut(config: Config, name: str, *, stage: int = 0, **parallel: Any) -> Config:
    return dataclasses.replace(
        config, name=name, parallel=ParallelConfig(**parallel), zero=ZeroConfig(stage)
    )


def saved(config: Config, step: int = STEPS) -> dict[str, Any]:
    return load(config.folder / "checkpoints" / f"step-{step:08}")[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Config:
    """A run of one process, with dropout and micro-batches."""
    config = config_of(
        tmp_path_factory.mktemp("plain"),
        "cpu",
        name="plain",
        dropout=0.1,
        micro_batch=2,
        validate_every=10,
    )
    train(config)
    assert losses(config)[-1] < losses(config)[0] - 0.8
    return config


@pytest.mark.parametrize(
    ("ranks", "stage", "parallel"),
    [
        full(2, 0, {"pp": 2, "schedule": "zb1p"}),  # which a stopped run has, below
        full(4, 0, {"pp": 2, "tp": 2, "sequence_parallel": True}),
        (4, 3, {"pp": 2, "dp": 2, "schedule": "interleaved", "v": 2, "recompute": "except_last"}),
    ],
)
def test_neither_losses_nor_norms_nor_weights_change(world, plain, ranks, stage, parallel):
    config = cut(plain, parallel.get("schedule", "1f1b"), stage=stage, **parallel)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [getattr(outcome, "steps", outcome) for outcome in outcomes] == [STEPS] * ranks
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    validated = [
        [
            row["validation_loss"]
            for row in read_rows(c.folder / "metrics.jsonl")
            if "validation_loss" in row
        ]
        for c in (config, plain)
    ]
    assert len(validated[0]) == 2
    assert same(*validated)
    ours, theirs = saved(config), saved(plain)
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, tensor in theirs["model"].items():
        torch.testing.assert_close(
            ours["model"][name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert torch.equal(ours["model"]["embedding.token.weight"], ours["model"]["head.output.weight"])
    assert (config.folder / "sample.txt").read_text() == (plain.folder / "sample.txt").read_text()


@pytest.mark.parametrize("tied", [full(False), True])
def test_two_stages_of_a_rank_with_other_layers_between(world, tmp_path, tied):
    """zbv, where the first and the last stage are one rank's, so that a tied table is complete with
    the later of them; rotary positions."""
    alone = config_of(
        tmp_path, "cpu", name="alone", num_steps=5, num_sample_tokens=0, micro_batch=1
    )
    alone = dataclasses.replace(
        alone, model=dataclasses.replace(alone.model, tied_head=tied, positions="rotary")
    )
    config = cut(alone, "zbv", pp=2, schedule="zbv", recompute="always")
    train(alone)
    world(2).run(train_on_rank, config)
    assert same(losses(config), losses(alone))
    assert same(norms(config), norms(alone), within=1e-4)


def resaved(rank: int, group: object, config: Config) -> int:
    """Take up the newest checkpoint, and save it again."""
    training = TextTraining(config, device=torch.device("cpu"))
    run = TrainingLoop(lambda _: training, config, resume=True)
    torch.distributed.barrier()  # all have read it
    if rank == 0:
        shutil.rmtree(config.folder / "checkpoints")
    torch.distributed.barrier()
    run.save()
    run.checkpoints.wait()
    return training.step


def test_any_layout_loads_any_others_checkpoint_bit_for_bit(world, plain, tmp_path):
    ours = dataclasses.replace(
        plain, name="moved", train=dataclasses.replace(plain.train, folder=str(tmp_path))
    )
    shutil.copytree(plain.folder, ours.folder)
    original = saved(plain)
    for ranks, stage, parallel in (
        (2, 0, {"pp": 2}),
        (2, 1, {"tp": 2}),
        (4, 1, {"pp": 2, "tp": 2}),
        (2, 0, {}),
        (4, 1, {"pp": 2, "schedule": "zbv"}),
        (2, 0, {"pp": 2}),
        (2, 1, {}),
    ):
        assert (
            world(ranks).run(resaved, cut(ours, "moved", stage=stage, **parallel))
            == [STEPS] * ranks
        )
        found = saved(ours)
        for part in ("model", "optimizer"):
            assert found[part].keys() == original[part].keys(), (parallel, part)
        for name, tensor in original["model"].items():
            assert torch.equal(found["model"][name], tensor), (parallel, name)
        for name, states in original["optimizer"].items():
            assert found["optimizer"][name].keys() == states.keys(), (parallel, name)
            for key, value in states.items():
                assert torch.equal(
                    torch.as_tensor(found["optimizer"][name][key]), torch.as_tensor(value)
                ), (name, key)


# What a pipeline saves is loaded without one above, bit for bit.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        full((2, 0, {"pp": 2}), (2, 1, {})),
        full((2, 0, {"tp": 2}), (4, 1, {"pp": 2, "schedule": "gpipe"})),
    ],  # any layout loads any other's checkpoint above, and a stopped run of stages resumes below
)
def test_a_run_goes_on_in_another_layout(world, plain, tmp_path, before, after):
    ours = dataclasses.replace(
        plain, name="ours", train=dataclasses.replace(plain.train, folder=str(tmp_path))
    )
    ranks, stage, parallel = before
    world(ranks).run(train_and_stop_rank_1, cut(ours, "ours", stage=stage, **parallel))
    assert len(losses(ours)) < STEPS
    ranks, stage, parallel = after
    world(ranks).run(train_on_rank, cut(ours, "ours", stage=stage, **parallel), True)
    assert same(losses(ours), losses(plain))


def test_a_stopped_run_resumes_bit_for_bit(world, plain, tmp_path):
    options = dataclasses.replace(
        plain.train, folder=str(tmp_path), num_steps=10, validate_every=0, num_sample_tokens=0
    )
    straight, broken = (
        cut(dataclasses.replace(plain, train=options), name, stage=1, pp=2, schedule="zb1p")
        for name in ("straight", "broken")
    )
    world(4).run(train_on_rank, straight)
    world(4).run(train_and_stop_rank_1, broken)
    assert len(losses(broken)) < 10
    world(4).run(train_on_rank, broken, True)
    assert losses(broken) == losses(straight)
    assert norms(broken) == norms(straight)


@pytest.mark.full  # a step is skipped on all ranks below; scales: test_zero.py
def test_fp16_overflows_on_any_stage_and_the_loss_scale_falls(world, tmp_path):
    scaled = PrecisionConfig("fp16", initial_scale=2.0**20, hysteresis=1, scale_window=9)
    alone = dataclasses.replace(
        config_of(tmp_path, "cpu", name="alone", micro_batch=2, num_sample_tokens=0),
        precision=scaled,
    )
    config = cut(alone, "cut", pp=2, schedule="zb1p")
    train(alone)
    world(2).run(train_on_rank, config)
    ours, theirs = (read_rows(c.folder / "metrics.jsonl") for c in (config, alone))
    assert [row["loss_scale"] for row in ours] == [row["loss_scale"] for row in theirs]
    assert 2 <= ours[-1]["skipped"] == theirs[-1]["skipped"]
    assert same(losses(config), losses(alone), within=3e-2)
    assert losses(config)[-1] < losses(config)[0] - 0.8


def reductions(
    rank: int, group: object, config: Config
) -> tuple[list[Any], set[str], dict[str, int]]:
    """Of one step: actions and buckets' names in the order in which they were done or left;
    parameters here; bytes kept."""
    run = TextTraining(config, device=torch.device("cpu"))
    done: list[Any] = []
    staged = run.strategy.trainer.parts.staged
    inner, before = ReduceScatterBucket.start, staged.pipeline._train.on_action

    def start(self: ReduceScatterBucket, *args: Any, **named: Any) -> None:
        done.append([self.flat.names[i] for i in self.members])
        inner(self, *args, **named)

    def after(action: Any) -> None:
        done.append(str(action))
        before(action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReduceScatterBucket, "start", start)
        staged.pipeline.on_action(after)
        run.train_step()
    return done, {name for name, _ in run.model.named_parameters()}, run.strategy.memory()


def test_a_stage_is_reduced_once_as_soon_as_its_gradients_are_complete(world, tmp_path):
    """Rank 0 has stages 0 and 2 of 4; stage 2 is reduced while stage 0 still computes."""
    config = config_of(tmp_path, "cpu", micro_batch=1, bucket_bytes=1048, stage=1)
    config = cut(config, "once", stage=1, pp=2, schedule="interleaved", v=2)
    everyone = world(4).run(reductions, config)
    for done, own, _ in everyone:
        left = [name for each in done if isinstance(each, list) for name in each]
        assert sorted(left) == sorted(own), "each parameter once"
    done, own, kept = everyone[0]
    assert {name.split(".")[0] + "." + name.split(".")[1] for name in own if "blocks" in name} == {
        "blocks.1"
    }
    assert "embedding.token.weight" in own
    complete = done.index(f"2B{3}")
    assert isinstance(done[complete + 1], list)
    assert any(isinstance(each, str) for each in done[complete + 2 :]), "stage 0 is not over"
    whole = sum(p.numel() for p in everyone_alone(tmp_path)) * 4
    assert kept["parameters"] < 0.75 * whole, "other layers have no memory here"


def everyone_alone(folder: Path) -> list[torch.nn.Parameter]:
    return list(
        TextTraining(
            config_of(folder, "cpu", name="whole"), device=torch.device("cpu")
        ).model.parameters()
    )


def poisoned(rank: int, group: object, config: Config) -> tuple[list[Any], bool]:
    """Three steps, in the second of which a gradient of the last stage is infinite: norms, and
    whether weights stayed."""
    run = TextTraining(config, device=torch.device("cpu"))
    found, stayed = [], False
    for step in range(3):
        before = [p.detach().clone() for p in run.model.parameters()]
        hooks = [
            p.register_hook(lambda g: g * math.inf)
            for n, p in run.model.named_parameters()
            if step == 1 and n == "head.norm.bias"
        ]
        row, _ = run.train_step()
        found.append(row["grad_norm"])
        for hook in hooks:
            hook.remove()
        if step == 1:
            stayed = all(
                torch.equal(a, b) for a, b in zip(before, run.model.parameters(), strict=True)
            )
    return found, stayed


def test_a_step_is_skipped_on_all_ranks_alike(world, tmp_path):
    config = cut(config_of(tmp_path, "cpu", micro_batch=2), "poisoned", pp=2)
    (first, stayed), (second, stayed_too) = world(2).run(poisoned, config)
    assert first == second
    assert [norm is None for norm in first] == [False, True, False]
    assert stayed
    assert stayed_too


def test_what_does_not_fit_is_said_before_anything_starts(tmp_path):
    config = config_of(tmp_path, "cpu")

    def parallel(**given: Any) -> Config:
        return dataclasses.replace(config, parallel=ParallelConfig(**given))

    for ranks, given, message in (
        (
            6,
            {"tp": 2, "pp": 2},
            r"parallel.tp x parallel.pp is 2 x 2 = 4, of which 6 ranks are no multiple; "
            r"start a multiple",
        ),
        (
            4,
            {"pp": 2, "dp": 1},
            r"parallel.dp is 1, but 4 ranks hold 2 models of 2 ranks each; start 2 "
            r"ranks, or set dp to 2",
        ),
        (
            2,
            {"pp": 2, "num_microbatches": 3},
            r"parallel.num_microbatches is 3, which does not divide the 8 sequences of a model",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            parallel(**given).check_ranks(ranks)
    with pytest.raises(
        ValueError,
        match=r"parallel.pp is 5, 5 stages by schedule '1f1b', but the model has 4 layers",
    ):
        parallel(pp=5)
    with pytest.raises(
        ValueError, match=r"pp is 2, but optimizer.name 'onebit_adam'.* set parallel\.pp to 1"
    ):
        dataclasses.replace(parallel(pp=2), optimizer=OptimizerConfig("onebit_adam"))
    with pytest.raises(
        ValueError, match=r"parallel.pp is 2, which does not take communication.codec 'int8'"
    ):
        dataclasses.replace(config_of(tmp_path, "cpu", codec="int8"), parallel=ParallelConfig(pp=2))
    with pytest.raises(ValueError, match=r"schedule is 'pipedream'; it must be one of gpipe, 1f1b"):
        ParallelConfig(pp=2, schedule="pipedream")
    with pytest.raises(
        ValueError, match=r"v is 2, but schedule '1f1b' has no such option; set it to interleaved"
    ):
        ParallelConfig(pp=2, v=2)
    with pytest.raises(
        ValueError, match=r"recompute is 'always', but pp is 1: there is no pipeline"
    ):
        ParallelConfig(recompute="always")
