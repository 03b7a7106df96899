"""`pyops train` over numbered samples: the same losses on any ranks, freezing included; stopped and
killed runs go on."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import (
    Config,
    ConfigError,
    ElasticConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from pyops.config.task_config import TaskConfig
from pyops.elastic import PaddedBatch
from pyops.models import ViTConfig
from pyops.train import train
from pyops.train.report.metrics import read_rows
from pyops.train.sample_training import SampleTraining
from tests.grids import full
from tests.train import tiny_run
from tests.train.tiny_run import losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only

EPOCHS, STEPS = 4, 4


def config_of(
    folder: Path, *, name: str = "run", freeze: str = "bound", pp: int = 1, **elastic: Any
) -> Config:
    """Digits by a tiny ViT, 4 steps an epoch."""
    return Config(
        name=name,
        task=TaskConfig(kind="digits", num_epochs=EPOCHS),
        vit=ViTConfig(
            image_size=8,
            num_channels=1,
            patch_size=4,
            num_labels=10,
            num_layers=4,
            num_heads=2,
            dim=16,
            dropout=0.1,
        ),
        elastic=ElasticConfig(freeze=freeze, alpha=0.4, **elastic),
        parallel=ParallelConfig(pp=pp),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=3, eps=1e-3),
        train=TrainConfig(
            folder=str(folder / "runs"),
            batch=420,
            seed=1,
            device="cpu",
            plot=name == "ranks 2",
            tensorboard=False,
        ),
    )


def column(config: Config, key: str) -> list[Any]:
    return [row[key] for row in read_rows(config.folder / "metrics.jsonl") if key in row]


def saved(config: Config) -> dict[str, Any]:
    return load(config.folder / "checkpoints" / f"step-{EPOCHS * STEPS:08}")[0]


def same_states(ours: dict[str, Any], theirs: dict[str, Any], *, within: float) -> bool:
    pairs = [(ours["model"][name], tensor) for name, tensor in theirs["model"].items()]
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"].keys() == theirs["optimizer"].keys()
    for name, slots in theirs["optimizer"].items():
        assert set(slots) >= {"exp_avg", "exp_avg_sq", "step"}
        pairs += [(ours["optimizer"][name][key], value) for key, value in slots.items()]
    return (
        max(
            float((torch.as_tensor(a).float() - torch.as_tensor(b).float()).abs().max())
            for a, b in pairs
        )
        <= within
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Config:
    config = config_of(tmp_path_factory.mktemp("alone"), name="alone", cache="off")
    outcome = train(config)
    assert outcome.steps == EPOCHS * STEPS
    assert outcome.accuracy is not None
    return config


@pytest.mark.parametrize(
    ("ranks", "pp", "cache"),
    [(4, 4, "on"), full(2, 2, "auto")],  # two are stopped and go on below, with the same losses
)
def test_any_ranks_give_the_losses_of_one(world, alone, ranks, pp, cache):
    config = config_of(Path(alone.train.folder).parent, name=f"ranks {ranks}", pp=pp, cache=cache)
    outcomes = world(ranks).run(train_on_rank, config)
    assert {getattr(outcome, "steps", outcome) for outcome in outcomes} == {EPOCHS * STEPS}
    assert same(losses(config), losses(alone))
    assert same(norms(config), norms(alone), within=1e-4)
    assert column(config, "validation_accuracy") == column(alone, "validation_accuracy")
    assert (
        column(config, "frozen") == column(alone, "frozen") == [0] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    )
    layouts = list(
        dict.fromkeys(zip(column(config, "stages"), column(config, "replicas"), strict=True))
    )
    assert layouts[0] == (pp, 1)
    assert layouts[-1] == (1, ranks)
    assert len(column(config, "transition_s")) == EPOCHS - 1
    assert same_states(saved(config), saved(alone), within=1e-5)
    if config.train.plot:
        assert (config.folder / "run.png").stat().st_size > 10_000


@pytest.mark.parametrize(("ranks", "pp", "method"), [full(4, 2, "ring"), full(4, 1, "ulysses")])
def test_ranks_that_share_the_tokens_of_samples_give_the_losses_of_one(
    world, alone, ranks, pp, method
):
    config = config_of(Path(alone.train.folder).parent, name=f"cp {method}", pp=pp)
    parallel = ParallelConfig(pp=pp, cp=2, cp_method=method)
    config = dataclasses.replace(config, parallel=parallel)
    outcomes = world(ranks).run(train_on_rank, config, timeout=200.0)
    assert {getattr(outcome, "steps", outcome) for outcome in outcomes} == {EPOCHS * STEPS}
    assert same(losses(config), losses(alone))
    assert same(norms(config), norms(alone), within=1e-4)
    for key in ("validation_accuracy", "frozen"):
        assert column(config, key) == column(alone, key)
    layouts = list(zip(column(config, "stages"), column(config, "replicas"), strict=True))
    assert (layouts[0], layouts[-1]) == ((pp, ranks // 2 // pp), (1, ranks // 2))
    assert not any(column(config, "cached"))
    assert same_states(saved(config), saved(alone), within=1e-5)


def test_a_cache_changes_no_bit(alone, tmp_path):
    for cache in ("on", "auto"):
        config = config_of(tmp_path, name=cache, cache=cache)
        train(config)
        assert losses(config) == losses(alone)
        assert same_states(saved(config), saved(alone), within=0.0)
    assert column(config_of(tmp_path, name="on"), "cached") == [False] * 4 + [True] * 12


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A SIGTERM arrives while this step is computed."""
    inner = SampleTraining.train_step

    def stopping(self: SampleTraining, share: PaddedBatch, *, stop: bool = False) -> Any:
        if share.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, share, stop=stop)

    monkeypatch.setattr(SampleTraining, "train_step", stopping)


@pytest.mark.parametrize(
    "step", [full(5), 6, full(7)]
)  # it is seen in the next: in the middle of an epoch, at its end, behind that
def test_a_stopped_run_resumes_bit_for_bit(alone, tmp_path, monkeypatch, step):
    config = config_of(tmp_path, cache="on")
    with monkeypatch.context() as patch:
        stop_before(patch, step)
        outcome = train(config)
    assert outcome.stopped_by == signal.SIGTERM
    assert step < outcome.steps <= step + 2  # not at the end of the epoch
    assert len(losses(config)) == outcome.steps
    assert train(config, resume=True).steps == EPOCHS * STEPS
    assert losses(config) == losses(alone)
    assert column(config, "frozen") == column(alone, "frozen")
    assert same_states(saved(config), saved(alone), within=0.0)


@pytest.mark.parametrize(
    ("step", "freeze"), [full(7, "percentile"), full(9, "percentile"), (5, "gradient_norm")]
)
def test_what_a_policy_has_seen_goes_on(tmp_path, monkeypatch, step, freeze):
    """Norms since the last decision, and those of the decision before."""
    straight = config_of(
        tmp_path, name="straight", freeze=freeze, every=3, percent=95.0, cache="off"
    )
    config = dataclasses.replace(straight, name="stopped")
    train(straight)
    decided = column(straight, "frozen")
    assert decided[-1] > decided[step + 1], "nothing is decided after the stop"
    with monkeypatch.context() as patch:
        stop_before(patch, step)
        train(config)
    train(config, resume=True)
    assert column(config, "frozen") == decided
    assert losses(config) == losses(straight)


def train_and_stop(rank: int, group: Any, config: Config, stopped: int, step: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank == stopped:
            stop_before(patch, step)
        return train(config)


@pytest.mark.full  # the next one stops with an idle rank
def test_ranks_stop_together_and_another_number_goes_on(world, alone, tmp_path):
    config = config_of(tmp_path, pp=2)
    outcomes = world(2).run(train_and_stop, config, 1, 5)
    assert {outcome.stopped_by for outcome in outcomes} == {signal.SIGTERM}
    assert len({outcome.steps for outcome in outcomes}) == 1
    other = dataclasses.replace(config, parallel=ParallelConfig(pp=1))
    world(3).run(train_on_rank, other, True)
    assert same(losses(config), losses(alone))
    assert same_states(saved(config), saved(alone), within=1e-5)


def test_ranks_stop_together_while_one_of_them_is_idle(world, alone, tmp_path):
    config = config_of(tmp_path, pp=2, replicate=False)
    outcomes = world(2).run(train_and_stop, config, 0, 13)
    assert {outcome.stopped_by for outcome in outcomes} == {signal.SIGTERM}
    assert {outcome.steps for outcome in outcomes} == {15}  # in the middle of the last epoch
    assert (column(config, "stages")[-1], column(config, "replicas")[-1]) == (1, 1)
    world(2).run(train_on_rank, config, True)
    assert same(losses(config), losses(alone))
    assert same_states(saved(config), saved(alone), within=1e-5)


def test_the_batch_of_each_replica_kept_means_fewer_steps(world, tmp_path):
    config = config_of(tmp_path, pp=2, batch_policy="replica", lr_rule="linear")
    world(2).run(train_on_rank, config)
    epochs = column(config, "epoch")
    assert [epochs.count(epoch) for epoch in range(EPOCHS)] == [4, 4, 2, 2]
    rates = column(config, "lr")
    assert rates[8] > 1.5 * rates[7]
    # The last step begins with 3 epochs of 4 steps and 840 samples behind it, 2 steps of the batch
    # at the start.
    assert rates[-1] == pytest.approx(2 * config.optimizer.lr_at(14, num_steps=16))


def saved_steps(config: Config) -> list[int]:
    return [
        int(path.name.removeprefix("step-"))
        for path in sorted((config.folder / "checkpoints").iterdir())
    ]


def test_without_epochs_it_trains_as_many_steps_as_it_is_told(tmp_path):
    config = config_of(tmp_path, cache="off")
    options = dataclasses.replace(config.train, num_steps=6, num_checkpoints=9)
    config = dataclasses.replace(config, task=TaskConfig(kind="digits"), train=options)
    outcome = train(config)
    assert outcome.steps == 6
    assert column(config, "step") == [*range(6)]
    assert column(config, "lr") == [config.optimizer.lr_at(step, num_steps=6) for step in range(6)]
    assert saved_steps(config) == [4, 6]
    assert column(config, "validation_accuracy")[1:] == [outcome.accuracy]
    again = train(config, resume=True)
    assert (again.steps, again.accuracy) == (6, outcome.accuracy)


def interval_of(folder: Path, name: str, *, pp: int) -> Config:
    """Decisions, checkpoints and the end, none of them where an epoch ends."""
    config = config_of(folder, name=name, pp=pp, cache="off", every=5, replicate=False)
    options = dataclasses.replace(config.train, num_steps=14, checkpoint_every=3, num_checkpoints=9)
    return dataclasses.replace(config, task=TaskConfig(kind="digits"), train=options)


# What is measured as it resumes stands below; a trial in tests/elastic/runtime/test_elastic.py.
@pytest.mark.full
@pytest.mark.parametrize("options", [{"trial": True}, {"rows_besides": 0.0}], ids=str)
def test_micro_batches_are_measured_and_tried_with_dropout(world, tmp_path, options):
    config = config_of(tmp_path, name="one", pp=2, cache="off", **options)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, num_epochs=1))
    assert config.vit.dropout > 0
    outcomes = world(2).run(train_on_rank, config)
    assert {getattr(outcome, "steps", outcome) for outcome in outcomes} == {STEPS}


def train_and_measure(rank: int, group: object, *args: Any) -> Any:
    """The time that is measured depends on what else the machine does."""
    with mock.patch("pyops.train.sample_training.rows_besides", return_value=3.5):
        return train_on_rank(rank, group, *args)


def test_what_one_stage_did_not_measure_is_measured_when_there_are_more(world, tmp_path):
    config = config_of(tmp_path, cache="off", rows_besides=0.0)
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, num_epochs=1))
    train(config)
    folder = config.folder / "checkpoints"
    assert load(folder / f"step-{STEPS:08}")[0]["besides"] == 0.0
    wider = dataclasses.replace(
        config, parallel=ParallelConfig(pp=2), task=dataclasses.replace(config.task, num_epochs=2)
    )
    found = world(2).run(train_and_measure, wider, True)
    assert {getattr(each, "steps", each) for each in found} == {2 * STEPS}
    assert load(folder / f"step-{2 * STEPS:08}")[0]["besides"] == 3.5


def test_a_finished_run_names_the_key_that_gives_it_more_steps(tmp_path, capsys):
    """Epochs where there are some, else steps."""
    config = config_of(tmp_path, cache="off", freeze="none")
    for key, found in (
        (
            "task.num_epochs",
            dataclasses.replace(
                config, name="epochs", task=TaskConfig(kind="digits", num_epochs=1)
            ),
        ),
        (
            "train.num_steps",
            dataclasses.replace(
                config,
                name="steps",
                task=TaskConfig(kind="digits"),
                train=dataclasses.replace(config.train, num_steps=2),
            ),
        ),
    ):
        train(found)
        capsys.readouterr()
        steps = train(found, resume=True).steps
        assert (
            f"already finished: {found.folder} has all {steps} steps; set {key} to more"
            in capsys.readouterr().out
        )


def test_a_resumed_run_needs_no_weights_to_begin_with(tmp_path):
    before = config_of(tmp_path, name="before")
    before = dataclasses.replace(before, task=TaskConfig("digits", num_epochs=1))
    train(before)
    config = config_of(tmp_path, name="after")
    config = dataclasses.replace(
        config, task=TaskConfig("digits", num_epochs=1, pretrained=str(before.folder))
    )
    train(config)
    shutil.rmtree(before.folder)
    longer = dataclasses.replace(config, task=dataclasses.replace(config.task, num_epochs=2))
    assert train(longer, resume=True).steps == 2 * STEPS
    with pytest.raises(ConfigError, match=r"task\.pretrained"):
        train(dataclasses.replace(longer, name="begins"))


@pytest.mark.full  # the next ones stop and resume with an idle rank
def test_checkpoints_in_the_middle_of_an_epoch_while_ranks_are_idle(world, tmp_path):
    alone, config = interval_of(tmp_path, "alone", pp=1), interval_of(tmp_path, "ranks", pp=4)
    train(alone)
    world(4).run(train_on_rank, config)
    for each in (alone, config):
        assert saved_steps(each) == [3, 4, 6, 8, 9, 12, 14]
        frozen = column(each, "frozen")
        assert [i for i in range(1, 14) if frozen[i] != frozen[i - 1]] == [5, 10], (
            "after every five steps, and at no other"
        )
        assert column(each, "frozen") == column(alone, "frozen")
    assert len(set(column(alone, "frozen"))) > 2
    assert min(column(config, "stages")) < 4, "no rank was idle"
    assert same(losses(config), losses(alone))
    straight = losses(config)
    for step in (9, 12, 14):
        shutil.rmtree(config.folder / "checkpoints" / f"step-{step:08}")
    world(4).run(train_on_rank, config, True)
    assert losses(config) == straight
    assert saved_steps(config)[-3:] == [9, 12, 14]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(pp=2, num_microbatches=4)}, "parallel.num_microbatches is 4"),
        (
            {"task": TaskConfig(kind="digits", pretrained="/nowhere")},
            "task.pretrained is '/nowhere'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(world, tmp_path, changes, message):
    answers = world(2).run(train_on_rank, dataclasses.replace(config_of(tmp_path), **changes))
    assert all(message in str(answer) for answer in answers), answers


def test_another_model_is_not_resumed(alone):
    other = dataclasses.replace(alone, vit=dataclasses.replace(alone.vit, num_layers=5))
    with pytest.raises(ConfigError, match=r"vit\.num_layers is 5"):
        train(other, resume=True)


def test_a_run_that_freezes_and_one_that_does_not_resume_their_own_alone(tmp_path):
    plain = tiny_run.config_of(tmp_path, "cpu", name="plain", num_steps=2, num_sample_tokens=0)
    plain = dataclasses.replace(plain, model=dataclasses.replace(plain.model, tied_head=False))
    freezing = dataclasses.replace(
        plain, name="freezing", elastic=ElasticConfig(freeze="bound", alpha=0.4)
    )
    train(plain)
    train(dataclasses.replace(freezing, task=TaskConfig(num_epochs=1)))
    with pytest.raises(
        ConfigError,
        match=r"a run over text in which nothing was frozen.* elastic\.freeze to 'none'",
    ):
        train(dataclasses.replace(freezing, name="plain"), resume=True)
    with pytest.raises(
        ConfigError,
        match=r"of task\.kind 'text', but this one .* set task\.kind and elastic\.freeze as "
        r"they were",
    ):
        train(dataclasses.replace(plain, name="freezing"), resume=True)
