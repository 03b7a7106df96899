"""A configuration of each task, so small that a test can train it."""

from __future__ import annotations

from pathlib import Path

from pyops.config import Config, TaskConfig, TrainConfig
from pyops.data import DataConfig
from pyops.models import BERTConfig, GPTConfig, ViTConfig


def config_of(cache: Path, kind: str, **options: object) -> Config:
    (cache / "text.py").write_text(
        "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(300))
    )
    sizes = {"num_layers": 3, "num_heads": 2, "dim": 16}
    path = str(cache / "text.py") if kind == "text" else "stdlib"
    return Config(
        task=TaskConfig(kind, **options),
        model=GPTConfig(sequence_length=16, tied_head=False, **sizes),
        vit=ViTConfig(
            num_labels=62 if kind == "characters" else 10,
            image_size=8,
            patch_size=4,
            num_channels=1,
            **sizes,
        ),
        bert=BERTConfig(
            vocab_size=258,
            sequence_length=32,
            tied_head=False,
            pooled_head=False,
            positions="rotary",
            **sizes,
        ),
        data=DataConfig(path=path, cache=str(cache), validation_fraction=0.4, max_bytes=1 << 16),
        train=TrainConfig(num_validation_sequences=8),
    )
