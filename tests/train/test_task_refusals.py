"""`pyops train` over numbered samples refuses what it has not, with the key to change, before
anything is done."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.config import (
    CommunicationConfig,
    Config,
    ConfigError,
    ElasticConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
    ZeroConfig,
)
from pyops.config.task_config import TaskConfig
from pyops.data import DataConfig
from pyops.models import BERTConfig, ViTConfig
from pyops.train import train
from pyops.train.sample_training import SampleTraining
from tests.train.tiny_run import train_on_rank

pytestmark = pytest.mark.cpu_only


def config_of(folder: Path, **changes: Any) -> Config:
    """Digits by the smallest ViT, two steps."""
    options: dict[str, Any] = {
        "name": "run",
        "task": TaskConfig(kind="digits", num_epochs=1),
        "optimizer": OptimizerConfig(warmup_steps=1),
        "vit": ViTConfig(
            image_size=8,
            num_channels=1,
            patch_size=4,
            num_labels=10,
            num_layers=2,
            num_heads=2,
            dim=8,
        ),
        "train": TrainConfig(
            folder=str(folder / "runs"), batch=1200, device="cpu", plot=False, tensorboard=False
        ),
        **changes,
    }
    return Config(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"precision": PrecisionConfig("fp16")},
            'precision.dtype is "fp16", .*; set it to "bf16"$',
        ),
        ({"zero": ZeroConfig(1)}, "zero.stage is 1, .*; set it to 0"),
        (
            {"recompute": RecomputeConfig(("blocks.*",))},
            r'recompute.modules is \["blocks.\*"\], .*; set it to \[\]$',
        ),
        (
            {"communication": CommunicationConfig("int8")},
            'communication.codec is "int8", .*; set it to "none"$',
        ),
        (
            {"optimizer": OptimizerConfig("onebit_adam")},
            'optimizer.name is "onebit_adam", .*; set it to "adamw"$',
        ),
        (
            {"parallel": ParallelConfig(schedule="zb1p")},
            'parallel.schedule is "zb1p", .*; set it to "1f1b"$',
        ),
        (
            {"task": TaskConfig(kind="digits", pretrained="/nowhere")},
            "task.pretrained is '/nowhere'",
        ),
    ],
)
def test_what_it_has_not(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(config_of(tmp_path, **changes))
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_weights_and_checkpoints_of_other_runs(tmp_path):
    first = config_of(tmp_path, elastic=ElasticConfig(freeze="bound", cache="off"))
    train(first)
    wide = dataclasses.replace(first.vit, dim=16)
    with pytest.raises(ConfigError, match="pretrained"):
        train(
            config_of(
                tmp_path,
                name="other",
                vit=wide,
                task=TaskConfig("digits", pretrained=str(first.folder), num_epochs=1),
            )
        )
    again = TaskConfig("digits", num_epochs=2)
    for elastic in (ElasticConfig(), ElasticConfig(freeze="percentile", cache="off")):
        with pytest.raises(
            ConfigError, match=r"checkpoint .* does not fit this configuration: .*polic"
        ):
            train(dataclasses.replace(first, elastic=elastic, task=again), resume=True)
    assert train(dataclasses.replace(first, task=again), resume=True).steps > 2, (
        "it can go on all the same"
    )


def test_passages_begin_with_weights_that_have_not_seen_what_they_hold_out(tmp_path):
    data = DataConfig(cache=str(tmp_path), validation_fraction=0.05, max_bytes=1 << 13)
    bert = BERTConfig(
        vocab_size=258,
        sequence_length=128,
        num_layers=1,
        num_heads=1,
        dim=4,
        tied_head=False,
        pooled_head=False,
        positions="rotary",
    )
    options = {"data": data, "bert": bert, "elastic": ElasticConfig()}
    before = config_of(
        tmp_path, name="before", task=TaskConfig("masked_text", num_epochs=1), **options
    )
    train(before)
    task = TaskConfig("passages", pretrained=str(before.folder), num_epochs=1, num_passages=4)
    after = config_of(tmp_path, name="after", **options | {"task": task})
    other = {"data": dataclasses.replace(data, validation_fraction=0.06)}
    with pytest.raises(
        ConfigError,
        match=r"before', a run over other text, or another split .* train it anew",
    ):
        train(dataclasses.replace(after, **other))
    assert train(after).accuracy is not None
    with pytest.raises(
        ConfigError,
        match=r"a run over other data, or another split of it; set \[data\] to what it was",
    ):
        train(
            dataclasses.replace(after, task=dataclasses.replace(task, num_epochs=2), **other),
            resume=True,
        )
    learned = dataclasses.replace(bert, positions="learned")
    with pytest.raises(
        ConfigError, match=r"have no embedding.position.weight; give a run of the same model"
    ):
        train(dataclasses.replace(after, name="third", bert=learned))


def test_ranks_that_are_no_multiple_of_the_stages(tmp_path):
    config = config_of(tmp_path, parallel=ParallelConfig(pp=2))
    config.check_ranks(2)
    with pytest.raises(
        ConfigError, match=r"parallel.tp x parallel.pp is 1 x 2 = 2, of which 3 ranks are no"
    ):
        config.check_ranks(3)


def test_fewer_rows_than_replicas(world, tmp_path):
    config = config_of(tmp_path)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, batch=1))
    answers = world(2).run(train_on_rank, config)
    assert all(
        "batch is 1, fewer than the 2 replicas; take 2 or more" in str(answer) for answer in answers
    ), answers


def train_without_memory(rank: int, group: Any, config: Config) -> Any:
    """Where the whole model does not fit the first rank."""
    inner = SampleTraining._model

    def make(self: SampleTraining, *, device: torch.device) -> Any:
        if device.type != "meta":
            raise torch.OutOfMemoryError("no memory for 70 GiB")
        return inner(self, device=device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleTraining, "_model", make)
        return train_on_rank(rank, group, config)


def test_a_model_that_is_too_large_to_be_measured_in_one_place(world, tmp_path):
    config = config_of(
        tmp_path, parallel=ParallelConfig(pp=2), elastic=ElasticConfig(rows_besides=0.0)
    )
    for answer in world(2).run(train_without_memory, config):
        assert "elastic.rows_besides is 0, so that rank 0 measures" in str(answer)
        assert "no memory for 70 GiB; set it to a number of rows" in str(answer)
