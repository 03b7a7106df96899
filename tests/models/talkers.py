"""Tiny models that generate, with parameters large enough that every part of them matters, the same
on every layout of ranks."""

from __future__ import annotations

from typing import Any

import torch

from pyops.mesh import ALONE
from pyops.models import GPT, T5, GPTConfig, T5Config
from pyops.tensor_parallel import initialize_model_

__all__ = ["PROMPTS", "TALKERS", "VOCAB", "talker"]

VOCAB = 13  # which 2 and 4 ranks don't divide
SIZES: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "dim": 8, "hidden": 10, "dropout": 0.1}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rotary",
    "num_kv_heads": 2,
    "bias": False,
    "tied_head": False,
}
TALKERS: dict[str, tuple[type, Any]] = {
    "gpt": (GPT, GPTConfig(vocab_size=VOCAB, sequence_length=24, **SIZES)),
    "llama": (GPT, GPTConfig(vocab_size=VOCAB, sequence_length=24, **SIZES, **LLAMA)),
    "t5": (T5, T5Config(vocab_size=VOCAB, num_buckets=4, max_distance=4, **SIZES)),
}
PROMPTS = [[3, 1, 4], [5], [9, 2, 6, 5, 3, 5, 8], [7, 7], [11]]


def talker(name: str, *, group: Any = ALONE, **options: Any) -> Any:
    """A model in float64."""
    kind, config = TALKERS[name]
    model = kind(config, group=group, seed=None, dtype=torch.float64, **options)
    with torch.no_grad():
        initialize_model_(model, seed=4, std=lambda name: 0.6)
    return model
