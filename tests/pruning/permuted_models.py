"""Small models in float64 whose every parameter and buffer matters, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyops.models import (
    BERT,
    GPT,
    T5,
    BERTConfig,
    CoAtNet,
    CoAtNetConfig,
    GPTConfig,
    T5Config,
    ViT,
    ViTConfig,
)

__all__ = ["MODELS", "outputs", "randomized"]

TEXT = {"vocab_size": 19, "sequence_length": 12, "num_layers": 2, "num_heads": 4, "dim": 32}
LLAMA = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "bias": False,
    "num_kv_heads": 2,
    "hidden": 24,
    "tied_head": False,
}
TINY: dict[str, Any] = {
    "num_labels": 5,
    "image_size": 16,
    "stem_width": 8,
    "kinds": ("C", "T"),
    "strides": (2, 2),
    "depths": (2, 2),
    "widths": (12, 16),
    "head_dim": 8,
}


def _image_model(**changes: Any) -> CoAtNet:
    return CoAtNet(CoAtNetConfig(**TINY | changes), dtype=torch.float64)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(**TEXT), dtype=torch.float64),
    "llama": lambda: GPT(GPTConfig(**TEXT, **LLAMA), dtype=torch.float64),
    "bert": lambda: BERT(BERTConfig(**TEXT), dtype=torch.float64),
    "roformer": lambda: BERT(BERTConfig(**TEXT, positions="rotary"), dtype=torch.float64),
    "t5": lambda: T5(
        T5Config(
            vocab_size=19, num_layers=2, num_heads=4, dim=32, num_buckets=8, activation="gated_gelu"
        ),
        dtype=torch.float64,
    ),
    "vit": lambda: ViT(
        ViTConfig(num_labels=5, image_size=8, patch_size=4, num_layers=2, num_heads=4, dim=32),
        dtype=torch.float64,
    ),
    "coatnet": _image_model,
    "coatnet, layer norms": lambda: _image_model(
        norm="layer", layer_scale=0.1, head_hidden=False, pre_norm_act=True, se_early=True
    ),
}


@torch.no_grad()
def randomized(model: nn.Module) -> nn.Module:
    """The same, in eval mode, without a parameter or a statistic at its first value."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = 0.3 * torch.randn_like(tensor)
            tensor.add_(noise.abs() if name.endswith("running_var") else noise)
    return model.eval()


def outputs(model: nn.Module) -> Tensor:
    """All that a model computes of two rows or images, flattened."""
    draw = torch.Generator().manual_seed(3)
    words, more = (torch.randint(19, (2, 12), generator=draw) for _ in range(2))
    if isinstance(model, T5):
        return model(words, more).flatten()
    if isinstance(model, BERT):
        logits, pairs = model(words, types=words % 2)
        return torch.cat([logits.flatten(), pairs.flatten()])
    if isinstance(model, GPT):
        return model(words).flatten()
    side = model.config.image_size
    channels = model.config.num_channels
    images = torch.randn(2, channels, side, side, generator=draw, dtype=torch.float64)
    return model(images).flatten()
