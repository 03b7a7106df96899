"""`pyops train` with a CoAtNet: digits enlarged to its images, the same losses on any ranks, and
what its norms don't go with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.checkpoint import load
from pyops.config import Config, ConfigError, OptimizerConfig, ParallelConfig, TrainConfig
from pyops.config.reading import load_config
from pyops.config.task_config import TaskConfig
from pyops.data import DataConfig
from pyops.models import CoAtNet, CoAtNetConfig, ViTConfig
from pyops.train import train
from pyops.train.tasks import make_task
from tests.grids import full
from tests.train.tiny_run import losses, train_on_rank

pytestmark = pytest.mark.cpu_only

COATNET: dict[str, Any] = {
    "num_labels": 10,
    "image_size": 32,
    "num_channels": 1,
    "stem_width": 4,
    "depths": (1, 1, 1, 1),
    "widths": (4, 8, 8, 8),
    "head_dim": 4,
    "stochastic_depth": 0.2,
}
VIT = ViTConfig(num_labels=10, image_size=8, patch_size=4, num_channels=1, num_heads=2, dim=8)


def config_of(
    folder: Path, *, name: str = "run", pp: int = 1, epochs: int = 2, **coatnet: Any
) -> Config:
    """Digits, four steps an epoch, the last one of the images that are left, at a constant rate."""
    return Config(
        name=name,
        task=TaskConfig("digits", "coatnet", num_epochs=epochs),
        coatnet=CoAtNetConfig(**{**COATNET, **coatnet}),
        data=DataConfig(validation_fraction=0.8),
        parallel=ParallelConfig(pp=pp),
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2, eps=1e-3, final_lr_ratio=1.0),
        train=TrainConfig(
            folder=str(folder / "runs"),
            batch=100,
            seed=1,
            device="cpu",
            plot=False,
            tensorboard=False,
        ),
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Config:
    config = config_of(tmp_path_factory.mktemp("alone"), name="alone", norm="layer")
    assert train(config).steps == 8
    return config


@pytest.mark.parametrize("pp", [full(1), 2])
def test_any_ranks_give_the_losses_of_one(world, alone, pp):
    config = config_of(Path(alone.train.folder).parent, name=f"stages {pp}", pp=pp, norm="layer")
    world(2).run(train_on_rank, config, timeout=120.0)
    assert losses(config) == pytest.approx(losses(alone), abs=1e-5)
    assert losses(alone)[-1] < losses(alone)[0]


def test_batch_norms_keep_their_statistics_over_a_stop(tmp_path):
    whole = config_of(tmp_path, name="whole")
    train(whole)
    parted = config_of(tmp_path, name="parted", epochs=1)
    train(parted)
    first = load(parted.folder / "checkpoints" / "step-00000004")[0]["model"]
    name = "blocks.1.norm1.norm.running_var"
    assert not torch.equal(first[name], torch.ones(32))
    more = dataclasses.replace(parted, task=dataclasses.replace(parted.task, num_epochs=2))
    train(more, resume=True)
    found, wanted = (
        load(each.folder / "checkpoints" / "step-00000008")[0]["model"] for each in (parted, whole)
    )
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    assert not torch.equal(found[name], first[name])


def refused(rank: int, group: object, config: Config) -> None:
    with pytest.raises(
        ConfigError, match=r"coatnet.norm is 'batch', .* 2 ranks; set it to \"layer"
    ):
        train(config)


def test_a_norm_over_a_batch_is_refused_on_several_ranks(world, tmp_path):
    world(2).run(refused, config_of(tmp_path))
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_images_are_enlarged(tmp_path):
    task = make_task(config_of(tmp_path))
    inputs, labels, named = task.batch(torch.tensor([3, 0]))
    assert inputs.shape == (2, 1, 32, 32)
    assert labels.shape == (2,)
    assert not named
    small = inputs.unfold(2, 4, 4).unfold(3, 4, 4).mean((-2, -1))
    vit = make_task(dataclasses.replace(config_of(tmp_path), task=TaskConfig("digits"), vit=VIT))
    assert (small - vit.batch(torch.tensor([3, 0]))[0]).abs().mean() < 0.2
    assert isinstance(task.model(seed=0), CoAtNet)
    assert task.layer_names == ["stem", *(f"blocks.{i}" for i in range(4)), "head"]


def test_lists_of_numbers_are_read_and_other_sections_refused(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "coatnet.toml"
    config = load_config(path, overrides=["coatnet.depths=[1, 1, 3, 1]"])
    assert config.coatnet.depths == (1, 1, 3, 1)
    assert config.num_blocks == 6
    for override, message in {
        "coatnet.depths=[1, 1.5, 2, 1]": r"coatnet.depths is .* a list of whole numbers, such as",
        "coatnet.image_size=40": "coatnet.image_size is 40, which is no multiple of 32",
        "coatnet.num_labels=9": "coatnet.num_labels is 9, but task.kind is 'digits': set it to 10",
        "task.model=bert": """task.model is 'bert'; it must be "", "vit", "coatnet", as kind""",
        "task.kind=text": """task.model is 'coatnet'; it must be "", as kind is 'text'""",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(path, overrides=[override])


@pytest.mark.full
@pytest.mark.parametrize(("norm", "accuracy"), [("batch", 0.96), ("layer", 0.94)])
def test_the_example_reads_digits(tmp_path, norm, accuracy):
    path = Path(__file__).parents[2] / "examples" / "coatnet.toml"
    overrides = [f"coatnet.norm={norm}", f"train.folder={tmp_path}", "train.device=cpu"]
    outcome = train(load_config(path, overrides=overrides))
    assert outcome.accuracy is not None
    assert outcome.accuracy >= accuracy
