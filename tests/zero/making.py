"""ZeroOptimizers from one dictionary of options, as tests over many of them have it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from pyops.zero import ZeroConfig, ZeroOptimizer

__all__ = ["zero_optimizer"]


def zero_optimizer(model: nn.Module, optimizer: Any, **options: Any) -> ZeroOptimizer:
    """Fields of ZeroConfig go there, everything else to ZeroOptimizer itself."""
    names = {each.name for each in fields(ZeroConfig)} & options.keys()
    config = ZeroConfig(**{name: options.pop(name) for name in sorted(names)})
    return ZeroOptimizer(model, optimizer, config, **options)
