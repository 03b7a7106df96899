"""[parallel] cp shares out the tokens of sequences over ranks, with tensor and pipeline parallelism
and [zero]; losses, norms and checkpoints stay as they are."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from pyops.checkpoint import load
from pyops.config import Config, ElasticConfig, ParallelConfig, TaskConfig, ZeroConfig
from pyops.elastic import Elastic, ElasticData, ElasticRun
from pyops.models import CoAtNetConfig
from pyops.train import train as train_alone
from pyops.train.report.metrics import read_rows
from tests.grids import full
from tests.train import tiny_tasks
from tests.train.test_resume import train_and_stop_rank_1
from tests.train.tiny_run import STEPS, config_of, losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only


def _with(config: Config, name: str, *, stage: int = 0, **parallel: Any) -> Config:
    return dataclasses.replace(
        config, name=name, parallel=ParallelConfig(**parallel), zero=ZeroConfig(stage)
    )


def _dropping(config: Config) -> Config:
    model = dataclasses.replace(config.model, attention_dropout=0.1)
    return dataclasses.replace(config, model=model)


def _model(config: Config) -> dict[str, torch.Tensor]:
    return load(config.folder / "checkpoints" / f"step-{STEPS:08}")[0]["model"]


@pytest.mark.parametrize(
    ("ranks", "stage", "parallel"),
    [
        (2, 0, {"cp": 2}),
        full(4, 3, {"cp": 2, "cp_method": "ring"}),
        (4, 0, {"cp": 2, "pp": 2, "cp_method": "ulysses"}),
        full(4, 1, {"cp": 2, "tp": 2, "sequence_parallel": True, "cp_method": "ring"}),
        full(4, 2, {"cp": 4, "cp_method": "ring", "cp_order": "striped"}),
        full(4, 3, {"cp": 2, "pp": 2, "cp_order": "contiguous"}),
        full(8, 3, {"cp": 2, "pp": 2, "tp": 2, "sequence_parallel": True, "cp_method": "ring"}),
        full(8, 2, {"cp": 2, "tp": 2}),
    ],
)
def test_neither_losses_nor_norms_nor_weights_change(
    world: Any, tmp_path: Any, ranks: int, stage: int, parallel: dict[str, Any], reference: Any
) -> None:
    plain = _dropping(config_of(tmp_path, "cpu", name="plain", dropout=0.1, micro_batch=2))
    config = _with(plain, "shared", stage=stage, **parallel)
    plain = reference(plain)
    outcomes = world(ranks).run(train_on_rank, config)
    assert [outcome.steps for outcome in outcomes] == [STEPS] * ranks, outcomes
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    assert losses(plain)[-1] < losses(plain)[0] - 0.8
    ours, theirs = _model(config), _model(plain)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(
            ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert (config.folder / "sample.txt").read_text() == (plain.folder / "sample.txt").read_text()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        full((2, {"cp": 2}, 2), (4, {"cp": 4, "cp_method": "ring"}, 3)),
        full((4, {"cp": 2, "pp": 2}, 0), (1, {}, 0)),
    ],
)
def test_a_checkpoint_of_one_layout_goes_on_in_another(
    world: Any, tmp_path: Any, before: Any, after: Any, reference: Any
) -> None:
    straight = config_of(tmp_path, "cpu", name="straight", dropout=0.1)
    straight = reference(straight)
    ranks, parallel, stage = before
    broken = _with(straight, "broken", stage=stage, **parallel)
    world(ranks).run(train_and_stop_rank_1, broken)
    ranks, parallel, stage = after
    world(ranks).run(train_on_rank, _with(broken, "broken", stage=stage, **parallel), True)
    assert same(losses(broken), losses(straight))


@pytest.mark.parametrize("kind", ["digits", full("masked_text"), full("passages"), full("text")])
def test_tasks_over_samples_have_the_losses_of_one_process(
    world: Any, tmp_path: Any, kind: str
) -> None:
    plain = tiny_tasks.config_of(tmp_path, kind, num_copies=1)
    bert = dataclasses.replace(plain.bert, dropout=0.1, attention_dropout=0.1)
    options = {"batch": 32, "num_steps": 4, "folder": str(tmp_path / "runs"), "device": "cpu"}
    train = dataclasses.replace(plain.train, **options, plot=False, tensorboard=False)
    vit = dataclasses.replace(plain.vit, dropout=0.1, attention_dropout=0.1)
    plain = dataclasses.replace(plain, name="plain", vit=vit, bert=bert, train=train)
    if kind == "digits":
        fewer = dataclasses.replace(plain.data, validation_fraction=0.05)
        plain = dataclasses.replace(plain, data=fewer)
    if kind != "masked_text":  # without what is frozen, too
        plain = dataclasses.replace(plain, elastic=ElasticConfig(freeze="bound", every=2))
    train_alone(plain)
    config = _with(plain, "shared", cp=2, cp_method="ring")
    outcomes = world(2).run(train_on_rank, config, timeout=180)
    assert [getattr(outcome, "steps", outcome) for outcome in outcomes] == [4] * 2
    assert same(losses(config), losses(plain))
    assert same(norms(config), norms(plain), within=1e-4)
    rows = [read_rows(each.folder / "metrics.jsonl")[-1] for each in (config, plain)]
    (ours, theirs) = ([v for k, v in row.items() if k.startswith("validation")] for row in rows)
    assert len(theirs) == 1
    assert same(ours, theirs)
    if kind == "digits":
        elastic = dataclasses.replace(config.elastic, cache="on")
        cached = dataclasses.replace(config, name="cached", elastic=elastic)
        for said in world(2).run(train_on_rank, cached):
            assert "elastic.cache is 'on', but parallel.cp is 2, whose ranks need" in said


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"cp": 0}, "cp is 0; it must be 1 or more"),
        ({"cp": 2, "cp_method": "all"}, "cp_method is 'all'; it must be one of gather, ulysses"),
        ({"cp": 2, "cp_order": "balanced"}, "cp_order is 'balanced'; it must be one of zigzag"),
        ({"cp_method": "ring"}, "cp_method is 'ring', but cp is 1"),
        ({"cp": 2, "adapt": True}, "cp is 2, and adapt chooses a layout without it"),
        ({"cp": 3}, "parallel.cp is 3, whose ranks can't share out the 16 tokens .* set it to 18"),
        (
            {"cp": 4, "tp": 2, "cp_method": "ulysses"},
            "parallel.cp is 4, but its ranks exchange the 1 heads that each has",
        ),
    ],
)
def test_refusals_name_the_key(tmp_path: Any, parallel: dict[str, Any], words: str) -> None:
    plain = config_of(tmp_path, "cpu")
    with pytest.raises(ValueError, match=words):
        _with(plain, "shared", **parallel)


@pytest.mark.parametrize(
    ("kind", "parallel", "words"),
    [
        ("passages", {"cp": 3}, "the 32 tokens of bert.sequence_length in the order contiguous"),
        ("digits", {"cp": 4, "cp_method": "ulysses"}, "its ranks exchange the 2 heads that each"),
        ("digits", {"cp": 2, "cp_order": "striped"}, r"hold tokens of \[vit\] side by side; leave"),
    ],
)
def test_refusals_of_tasks_over_samples(
    tmp_path: Any, kind: str, parallel: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _with(tiny_tasks.config_of(tmp_path, kind), "shared", **parallel)


def test_convolutions_and_caches_do_not_go_with_shared_tokens(tmp_path: Any) -> None:
    plain = tiny_tasks.config_of(tmp_path, "digits")
    sized = CoAtNetConfig(image_size=32, num_channels=1, num_labels=10)
    by_convolutions = dataclasses.replace(
        plain, task=TaskConfig("digits", model="coatnet"), coatnet=sized
    )
    with pytest.raises(ValueError, match="whose convolutions mix neighbors; set it to 1"):
        _with(by_convolutions, "shared", cp=2)
    layers = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)}
    for run, words in (
        (ElasticRun(context=2), "context is 2, of which 1 ranks are no multiple"),
        (ElasticRun(context=0), "context is 0, of which"),
    ):
        with pytest.raises(ValueError, match=words):
            Elastic(
                layers,
                optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
                loss=lambda output, target: output.sum(),
                data=ElasticData(samples=4, batch=2, seed=0),
                run=run,
            )


def test_ranks_that_share_no_whole_number_of_models() -> None:
    assert ParallelConfig(cp=2, tp=2).copies(8) == 2
    with pytest.raises(ValueError, match=r"tp x parallel.cp is 2 x 2 = 4, of which 6 ranks"):
        ParallelConfig(cp=2, tp=2).copies(6)
    with pytest.raises(ValueError, match=r"^tp is 2, of which 3 ranks are no multiple; .* divisor"):
        ParallelConfig(tp=2).copies(3)
