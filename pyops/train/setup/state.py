"""What a checkpoint holds of the optimizer and of compressed communication: by parameter name, so
any layout reads any other.

    "optimizer":      {"head.weight": {"exp_avg": tensor [V, D], "exp_avg_sq": ..., "step": 7}, ...}
    "communication":  {"gradients": errors of DataParallel's codec, "optimizer": a one-bit
                      optimizer's phase, errors}

Errors are shards, a row per rank; a run on another number of ranks shares them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pyops.checkpoint import LazyTensor
from pyops.checkpoint.flat_state import flat_state, named_state
from pyops.config import ConfigError
from pyops.data_parallel import DataParallel

__all__ = ["load_optimizer_state", "optimizer_state", "read"]


def optimizer_state(optimizer: torch.optim.Optimizer, parallel: DataParallel) -> dict[str, Any]:
    """{"optimizer", "communication"}: tensors over the flat buffers are cut into parameters."""
    whole = optimizer.state_dict()
    moments: dict[str, Any] = {}
    for i, buffer in enumerate(parallel.flat):
        moments |= named_state(whole["state"].get(i, {}), buffer.layout)
    communication = {
        "gradients": parallel.communication_state(),
        "optimizer": whole.get("communication", {}),
    }
    return {"optimizer": moments, "communication": communication}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, parallel: DataParallel, state: Mapping[str, Any]
) -> None:
    """Take up `optimizer_state`, laid out as it is here. A collective.

    Raises:
        ConfigError: For the state of another codec.
    """
    whole = optimizer.state_dict()
    for i, buffer in enumerate(parallel.flat):
        if flat := flat_state(state["optimizer"], buffer.layout):
            whole["state"][i] = flat
    communication = state.get("communication", {})
    if communication.get("optimizer"):
        whole["communication"] = communication["optimizer"]
    try:
        optimizer.load_state_dict(whole)
        if communication.get("gradients"):
            parallel.load_communication_state(communication["gradients"])
    except ValueError as error:
        raise ConfigError(f"the checkpoint does not fit this configuration: {error}") from None


def read(state: Any) -> Any:
    """A state of a checkpoint that was loaded lazily, with every tensor read."""
    if isinstance(state, LazyTensor):
        return state.read()
    if isinstance(state, Mapping):
        return {key: read(value) for key, value in state.items()}
    return type(state)(read(value) for value in state) if isinstance(state, list | tuple) else state
