"""Models with adapters whose B is not zero, the same on every layout of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pyops import random
from pyops.adapters import LoRA
from pyops.flat import Placement

__all__ = ["filled", "whole_gradients"]


@torch.no_grad()
def filled(model: nn.Module, **options: Any) -> LoRA:
    """Adapters of rank 3 unless told, each B drawn by its layer's name."""
    lora = LoRA(model, **{"rank": 3, "alpha": 6, "seed": 2, **options})
    for name, adapter in lora.adapters.items():
        place = getattr(adapter, "placements", {}).get("B")
        place = place or Placement.whole(adapter.B.shape, rank=0, ranks=1)
        part = place.part(adapter.B.data)
        values = random.normal(
            7, name, part.shape, std=0.3, offset=place.offset, global_shape=place.global_shape
        )
        part.copy_(values)
    return lora


def whole_gradients(lora: LoRA) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]]:
    """{name: (whole shape, offset, this rank's part)}."""
    found = {}
    for name, adapter in lora.adapters.items():
        for key in "AB":
            gradient = adapter.get_parameter(key).grad
            assert gradient is not None, name
            place = getattr(adapter, "placements", {}).get(key)
            place = place or Placement.whole(gradient.shape, rank=0, ranks=1)
            found[f"{name}.{key}"] = (place.global_shape, place.offset, place.part(gradient))
    return found
