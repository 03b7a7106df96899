"""Optimizer state over a flat buffer, by parameter name: a checkpoint does not know how parameters
were laid out.

flat:    exp_avg |  head.weight  |pad|  block.0.bias  | ...        step: 7
named:   {"head.weight": {"exp_avg": tensor [V, D], "step": 7}, "block.0.bias": {"exp_avg": tensor
         [D], "step": 7}, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyops.checkpoint.format.manifest import CheckpointError
from pyops.flat import FlatLayout

__all__ = ["flat_state", "named_state"]


def named_state(flat: Mapping[str, Any], layout: FlatLayout) -> dict[str, dict[str, Any]]:
    """{parameter name: {key: value}}: tensors as long as the buffer are cut into views, anything
    else belongs to each."""
    found: dict[str, dict[str, Any]] = {name: {} for name in layout.names}
    for key, value in flat.items():
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            whole = isinstance(value, Tensor) and value.shape == (layout.numel,)
            found[name][key] = value[layout.slice(name)].view(shape) if whole else value
    return found


def flat_state(named: Mapping[str, Mapping[str, Any]], layout: FlatLayout) -> dict[str, Any]:
    """The state over a flat buffer of this layout; padding is zero.

    Raises:
        CheckpointError: When parameters are missing.
    """
    missing = [name for name in layout.names if name not in named]
    if missing:
        raise CheckpointError(
            "the checkpoint has no optimizer state for "
            f"{', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}; "
            "it is of another model: use that model's configuration"
        )
    flat: dict[str, Any] = {}
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        for key, value in named[name].items():
            if isinstance(value, Tensor) and value.shape == shape and key != "step":
                if key not in flat:
                    flat[key] = torch.zeros(layout.numel, dtype=value.dtype, device="cpu")
                flat[key][layout.slice(name)] = value.flatten()
            else:
                flat[key] = value
    return flat
