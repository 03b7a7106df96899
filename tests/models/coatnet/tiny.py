"""A CoAtNet with every kind of block, so small that a test can train it on several ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pyops.models import CoAtNet, CoAtNetConfig

__all__ = ["BATCH", "LABELS", "TINY", "config_of", "images_of", "make"]

BATCH, LABELS = 4, 5
TINY: dict[str, Any] = {
    "num_labels": LABELS,
    "image_size": 32,
    "image_width": 64,  # so that rows and columns of a grid are told apart
    "num_channels": 1,
    "stem_width": 4,
    "depths": (1, 2, 1, 2),
    "widths": (4, 8, 16, 12),  # 4 heads, then 3
    "head_dim": 4,
}


def config_of(**changes: Any) -> CoAtNetConfig:
    return CoAtNetConfig(**{**TINY, **changes})


def make(*, seed: int = 5, dtype: torch.dtype = torch.float64, **options: Any) -> CoAtNet:
    """options: fields of the configuration, and arguments of the model."""
    own = {key: options.pop(key) for key in ("group", "tp_stages", "batch_group") if key in options}
    model = CoAtNet(config_of(**options), seed=seed, dtype=dtype, **own)
    with torch.no_grad():  # small tables would hide a wrong one
        for name, p in model.named_parameters():
            if name.endswith("bias.table"):
                p.mul_(20.0)
    return model


@functools.cache
def _data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(LABELS, (BATCH,), generator=generator)
    noise = torch.randn(BATCH, 1, 32, 64, generator=generator)
    return noise + torch.linspace(-1, 1, 64) * (labels - 2).view(-1, 1, 1, 1), labels


def images_of(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Images [4, 1, 32, 64], and their labels."""
    images, labels = _data(step)
    return images.to(dtype), labels
