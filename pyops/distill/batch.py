"""What a model is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

__all__ = ["Batch", "call_model"]

Batch = Tensor | Mapping[str, Tensor]
"""Tokens [B, T], or a mapping of the arguments of a model."""


def call_model(model: nn.Module, batch: Batch) -> Any:
    """What the model returns."""
    return model(batch) if isinstance(batch, Tensor) else model(**batch)
