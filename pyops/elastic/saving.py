"""What a checkpoint has of an elastic run: tensors by name, whoever held them, so that any number of ranks can go on from it.

rank 0  {0: embedding, 1: block 0}  --.                              .--  {0: embedding, 1: block 0, 2: head}
rank 1  {2: head}                   --+--  "model", "optimizer"  ----+--  on one rank
rank 2  of another replica: nothing --'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.elastic.holding import values_of
from pyops.elastic.transition import State
from pyops.flat import Shard

__all__ = ["saved", "states_of"]


def saved(states: Mapping[int, State], *, writes: bool) -> dict[str, Any]:
    """{"model": {name: Shard}, "optimizer": {name: {key: Shard}}} of a rank's layers. writes: False where another rank writes
    the same ones."""
    model = {name: _shard(tensor, writes) for each in states.values() for name, tensor in each["parameters"].items()}
    slots = {
        name: {key: _shard(torch.as_tensor(value), writes) for key, value in own.items() if value is not None}
        for each in states.values() for name, own in each["slots"].items()
    }  # fmt: skip
    return {"model": model, "optimizer": slots}


def _shard(tensor: Tensor, writes: bool) -> Shard:
    tensor = tensor.detach()
    return Shard(tuple(tensor.shape), (0,) * tensor.dim(), tensor, copy=not writes)


def states_of(state: Mapping[str, Any], *, layers: Mapping[str, nn.Module], numbers: Sequence[int]) -> dict[int, State]:
    """The states of these layers, read from what `saved` gave all together. layers: all of them, by name.

    ValueError for a tensor of a layer that is not there.
    """
    found: dict[int, State] = {}
    names = list(layers)
    for number in numbers:
        begin = f"{names[number]}."
        missing = next((own for own in values_of(layers[names[number]]) if f"{begin}{own}" not in state["model"]), None)
        if missing is not None:
            raise ValueError(f"the state has no {begin}{missing}; it is of another model")
        parameters = {name: _whole(value) for name, value in state["model"].items() if name.startswith(begin)}
        slots = {
            name: {key: _whole(value) for key, value in own.items()}
            for name, own in state["optimizer"].items() if name.startswith(begin)
        }  # fmt: skip
        found[number] = {"parameters": parameters, "slots": slots}
    return found


def _whole(value: Any) -> Any:
    """A tensor of memory of its own; `value` may be in a checkpoint still."""
    if isinstance(value, Shard):
        return value.tensor.clone()
    return value.read() if hasattr(value, "read") else value.clone()
