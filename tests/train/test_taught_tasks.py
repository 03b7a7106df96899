"""A task over images learns from an earlier run of it, on any ranks, and goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, DistillConfig, ParallelConfig, TaskConfig
from pyops.train import train
from tests.grids import full
from tests.optional_packages import skip_module_without
from tests.train.test_task_runs import STEPS, column, config_of
from tests.train.tiny_run import losses, norms, same, train_on_rank

pytestmark = pytest.mark.cpu_only
EPOCHS = 2
skip_module_without("sklearn")


def taught(teacher: Config, name: str, *, pp: int = 1, **options: Any) -> Config:
    """Half of the teacher's layers, which learn from it."""
    base = dataclasses.replace(teacher, name=name)
    distill = DistillConfig(str(teacher.folder), keep=(0, 2), **{"hard": 0.3, **options})
    return dataclasses.replace(
        base,
        vit=dataclasses.replace(base.vit, num_layers=2),
        distill=distill,
        parallel=ParallelConfig(pp=pp),
    )


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = config_of(tmp_path_factory.mktemp("taught"), name="teacher", freeze="none")
    config = dataclasses.replace(
        config,
        task=TaskConfig("digits", num_epochs=EPOCHS),
        vit=dataclasses.replace(config.vit, dropout=0.0),
    )
    train(config)
    return config


@pytest.fixture(scope="module")
def alone(teacher: Config) -> Config:
    config = taught(teacher, "alone")
    train(config)
    return config


def test_the_first_loss_is_that_of_whole_logits(teacher: Config, alone: Config):
    """Of the student as it begins: the teacher's embedding, head and two of its four layers."""
    from pyops.train.sample_training import SampleTraining

    training = SampleTraining(dataclasses.replace(alone, name="new"), device=torch.device("cpu"))
    state, _ = load(teacher.folder / "checkpoints" / f"step-{EPOCHS * STEPS:08}")
    task, known = training.task, state["model"]
    model = task.model_like(teacher.vit, seed=0).eval()
    model.load_state_dict(known)
    student = task.model(seed=0)
    student.load_state_dict(
        {
            name.replace("blocks.2.", "blocks.1."): value
            for name, value in known.items()
            if not name.startswith(("blocks.1.", "blocks.3."))
        }
    )
    (share,) = training.elastic.shares(most=1)
    images, targets, _ = task.batch(share.samples)
    task.teacher = None
    _, labels, _ = task.batch(share.samples)
    with torch.no_grad():
        z, y = student(images), model(images)
    cross = torch.nn.functional.cross_entropy(z, labels)
    p, q = (x.div(2).log_softmax(1) for x in (y, z))
    soft = 4 * torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert soft > 1e-3
    assert torch.equal(targets[:, 0].long(), labels)
    torch.testing.assert_close(targets[:, 1:], y, rtol=0, atol=1e-5)
    assert losses(alone)[0] == pytest.approx(float(0.5 * soft + 0.3 * cross), abs=1e-5)


@pytest.mark.parametrize("pp", [2, full(1)])
def test_two_ranks_have_the_losses_of_one(world: Any, alone: Config, teacher: Config, pp: int):
    config = taught(teacher, f"ranks-{pp}", pp=pp)
    world(2).run(train_on_rank, config)
    assert same(losses(config), losses(alone))
    assert same(norms(config), norms(alone), within=1e-4)
    assert column(config, "validation_accuracy") == column(alone, "validation_accuracy")


def test_a_run_goes_on_with_its_teacher(teacher: Config, alone: Config):
    config = taught(teacher, "resumed")
    config = dataclasses.replace(
        config, train=dataclasses.replace(config.train, checkpoint_every=STEPS, num_checkpoints=9)
    )
    train(config)
    last = config.folder / "checkpoints" / f"step-{EPOCHS * STEPS:08}"
    last.rename(config.folder / "gone")
    train(config, resume=True)
    assert losses(config) == losses(alone)


def test_teachers_that_do_not_fit(teacher: Config, tmp_path: Path):
    config = taught(teacher, "refused")
    cases = [
        ({"distill": DistillConfig(str(tmp_path))}, "where no checkpoint is in"),
        ({"distill": DistillConfig(str(teacher.folder), keep=(0, 4))}, "are 0 to 3"),
        (
            {
                "task": TaskConfig("characters"),
                "vit": dataclasses.replace(config.vit, num_labels=62),
            },
            "of task.kind 'digits', but this one is of 'characters'",
        ),
        (
            {"vit": dataclasses.replace(config.vit, dim=32)},
            "in the weights of distill.teacher",
        ),
    ]
    for changes, said in cases:
        with pytest.raises(ConfigError, match=said):
            train(dataclasses.replace(config, **changes))
    for changes, said in (
        ({"distill": DistillConfig("x", hidden=1.0)}, r"distill\.hidden is 1\.0.*set it to 0"),
        ({"parallel": ParallelConfig(cp=2)}, r"parallel\.cp is 2.*set it to 1"),
        ({"distill": DistillConfig("x", keep=(0,))}, r"has 1 layers, but vit\.num_layers is 2"),
        (
            {"task": TaskConfig("digits", pretrained="y")},
            r"distill\.keep is \[0, 2\].*task\.pretrained is 'y'",
        ),
        ({"task": TaskConfig("text")}, r"task\.kind is 'text'.*one of digits"),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"soft": 2.0}, 'soft is 2.0, but teacher is ""'),
        ({"teacher": "x", "keep": (1, 1)}, r"keep is \[1, 1\]"),
        ({"teacher": "x", "kind": "L2"}, "'L2'"),
        ({"teacher": "x", "temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        DistillConfig(**options)


def test_pairs_of_layers_in_a_file():
    from pyops.config import config_of as of_tables

    tables = {"model": {"folder": "x"}, "distill": {"teacher": "y", "layers": [[0, 1], [-1, -1]]}}
    assert of_tables(tables).distill.layers == ((0, 1), (-1, -1))
    for wrong in ([0, 1], [[0]], [[0, True]], "x"):
        tables["distill"]["layers"] = wrong
        with pytest.raises(ConfigError, match=r"distill\.layers is .*a list of pairs"):
            of_tables(tables)
