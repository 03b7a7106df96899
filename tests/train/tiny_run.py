"""A run so small that a test can train it, and ways to look at it and to interrupt it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from pyops.config import (
    CommunicationConfig,
    Config,
    ConfigError,
    OptimizerConfig,
    PrecisionConfig,
    RecomputeConfig,
    TrainConfig,
    ZeroConfig,
)
from pyops.data import CorpusError, DataConfig
from pyops.models import GPTConfig
from pyops.train import TextTraining, train
from pyops.train.report.metrics import read_rows

STEPS = 20


def config_of(
    folder: Path,
    device: torch.device | str,
    *,
    name: str = "run",
    dropout: float = 0.0,
    optimizer: dict[str, Any] | None = None,
    codec: str = "none",
    stage: int = 0,
    offload: str = "none",
    recompute: tuple[str, ...] = (),
    precision: str = "fp32",
    **options: Any,
) -> Config:
    """A tiny run on a text of which it can learn something in 20 steps."""
    text = folder / "text.py"
    if not text.exists():
        text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(300)))
    given = {
        "num_steps": STEPS,
        "batch": 8,
        "num_validation_sequences": 6,
        "num_sample_tokens": 5,
        "validate_every": 0,
        "plot": False,
        "tensorboard": False,
        **options,
    }
    return Config(
        name=name,
        model=GPTConfig(sequence_length=16, num_layers=2, num_heads=2, dim=16, dropout=dropout),
        data=DataConfig(path=str(text), cache=str(folder / "cache")),
        optimizer=OptimizerConfig(**{"lr": 1e-2, "warmup_steps": 3, **(optimizer or {})}),
        communication=CommunicationConfig(codec),
        precision=PrecisionConfig(precision),
        zero=ZeroConfig(stage, offload=offload),
        recompute=RecomputeConfig(recompute),
        train=TrainConfig(folder=str(folder / "runs"), device=torch.device(device).type, **given),
    )


def losses(config: Config) -> list[float]:
    return [row["loss"] for row in read_rows(config.folder / "metrics.jsonl")]


def norms(config: Config) -> list[float]:
    """The gradients' norms: Adam forgives a wrong scale of the gradient, these don't."""
    return [row["grad_norm"] for row in read_rows(config.folder / "metrics.jsonl")]


def same(a: list[float], b: list[float], *, within: float = 1e-5) -> bool:
    return len(a) == len(b) and max(abs(x - y) for x, y in zip(a, b, strict=True)) <= within


def train_on_rank(rank: int, group: object, config: Config, resume: bool = False) -> Any:
    """Body of a worker: the outcome, or what it was told."""
    try:
        return train(config, resume=resume)
    except (ConfigError, CorpusError) as error:
        return str(error)


def stop_before(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A SIGTERM arrives while this step is computed."""
    inner = TextTraining.train_step

    def stopping(self: TextTraining, *, stop: bool = False) -> Any:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, stop=stop)

    monkeypatch.setattr(TextTraining, "train_step", stopping)
