"""What a checkpoint has of an elastic run: tensors by name, whoever held them, so that any number
of ranks can go on from it.

rank 0  {0: embedding, 1: block 0}  --.                            .--  {0: embedding, 1: block 0,
rank 1  {2: head}                   --+-- "model", "optimizer" ----+--   2: head} on one rank
rank 2  of another replica: nothing --'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.elastic.layout.layer_memory import values_of
from pyops.elastic.layout.layer_moves import LayerState
from pyops.flat import Shard

__all__ = ["run_of", "saved", "states_of"]


def saved(states: Mapping[int, LayerState], *, writes: bool) -> dict[str, Any]:
    """{"model": {name: Shard}, "optimizer": {name: {key: Shard}}} of a rank's layers.

    Args:
        writes: False where another rank writes the same ones.
    """
    model = {
        name: _shard(tensor, writes)
        for each in states.values()
        for name, tensor in each["parameters"].items()
    }
    slots = {
        name: {
            key: _shard(torch.as_tensor(value), writes)
            for key, value in own.items()
            if value is not None
        }
        for each in states.values()
        for name, own in each["slots"].items()
    }
    return {"model": model, "optimizer": slots}


def _shard(tensor: Tensor, writes: bool) -> Shard:
    tensor = tensor.detach()
    return Shard(tuple(tensor.shape), (0,) * tensor.dim(), tensor, copy=not writes)


def run_of(state: Mapping[str, Any], *, blocks: int, has_policy: bool) -> Mapping[str, Any]:
    """What is in a state besides tensors.

    Raises:
        ValueError: For that of another kind of run, of as many blocks and with a policy.
    """
    if "elastic" not in state:
        raise ValueError(
            "the state has no 'elastic': it is of a run that was not elastic; give what "
            "Elastic.state_dict told"
        )
    run: Mapping[str, Any] = state["elastic"]
    if (others := len(run["meter"]["squares"])) != blocks:
        raise ValueError(
            f"the state is of a model with {others} blocks, but there are {blocks}; give "
            "the model that was saved"
        )
    if (run["policy"] is None) == has_policy:
        raise ValueError(
            "one of the state and this run has a policy, and the other none; give the "
            "policy that was saved"
        )
    return run


def states_of(
    state: Mapping[str, Any], *, layers: Mapping[str, nn.Module], numbers: Sequence[int]
) -> dict[int, LayerState]:
    """The states of these layers, read from what `saved` gave all together.

    Args:
        layers: All of them, by name.

    Raises:
        ValueError: Before anything is read, for a tensor of these layers that is not there or is
            another one, and for one that no layer has.
    """
    found: dict[int, LayerState] = {}
    names = list(layers)
    _check(state["model"], layers, [names[number] for number in numbers])
    for number in numbers:
        begin = f"{names[number]}."
        parameters = {
            name: _whole(value) for name, value in state["model"].items() if name.startswith(begin)
        }
        slots = {
            name: {key: _whole(value) for key, value in own.items()}
            for name, own in state["optimizer"].items()
            if name.startswith(begin)
        }
        found[number] = {"parameters": parameters, "slots": slots}
    return found


def _check(
    saved: Mapping[str, Any], layers: Mapping[str, nn.Module], wanted: Sequence[str]
) -> None:
    here = {
        f"{name}.{own}": tensor
        for name, layer in layers.items()
        for own, tensor in values_of(layer).items()
    }
    if (extra := next((name for name in saved if name not in here), None)) is not None:
        raise ValueError(
            f"the state has {extra}, which this model has not; give the model that was saved"
        )
    for name in (f"{layer}.{own}" for layer in wanted for own in values_of(layers[layer])):
        if name not in saved:
            raise ValueError(
                f"the state has no {name}; it is of another model; give the one that was saved"
            )
        there, tensor = saved[name], here[name]
        shape = there.global_shape if isinstance(there, Shard) else there.shape
        if (
            tuple(shape) != tuple(tensor.shape)
            or there.dtype.is_floating_point != tensor.dtype.is_floating_point
        ):
            raise ValueError(
                f"{name} is {[*shape]} {there.dtype} in the state, but {[*tensor.shape]} "
                f"{tensor.dtype} here; give the model "
                "that was saved"
            )


def _whole(value: Any) -> Any:
    """A tensor of memory of its own; `value` may be in a checkpoint still."""
    if isinstance(value, Shard):
        return value.tensor.clone()
    return value.read() if hasattr(value, "read") else value.clone()
