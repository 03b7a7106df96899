"""What a checkpoint holds of the model's and the optimizer's way: by parameter name, so that any layout reads any other.

"optimizer":      {"head.weight": {"exp_avg": tensor [V, D], "exp_avg_sq": ..., "step": 7}, ...}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyops.checkpoint.flat_state import flat_state, named_state
from pyops.data_parallel import DataParallel

__all__ = ["load_optimizer_state", "optimizer_state"]


def optimizer_state(optimizer: torch.optim.Optimizer, parallel: DataParallel) -> dict[str, Any]:
    """The moments over the flat buffers, cut into parameters."""
    states = optimizer.state_dict()["state"]
    moments: dict[str, Any] = {}
    for i, buffer in enumerate(parallel.flat):
        moments |= named_state(states.get(i, {}), buffer.layout)
    return moments


def load_optimizer_state(optimizer: torch.optim.Optimizer, parallel: DataParallel, state: Mapping[str, Any]) -> None:
    """Give the optimizer the moments of `optimizer_state`, laid out as they are here."""
    whole = optimizer.state_dict()
    for i, buffer in enumerate(parallel.flat):
        if flat := flat_state(state, buffer.layout):
            whole["state"][i] = flat
    optimizer.load_state_dict(whole)
