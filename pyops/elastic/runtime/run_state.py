"""What a checkpoint has of an elastic run: tensors by name, whoever held them, so that any number
of ranks can go on from it.

rank 0  {0: embedding, 1: block 0}  --.                            .--  {0: embedding, 1: block 0,
rank 1  {2: head}                   --+-- "model", "optimizer" ----+--   2: head} on one rank
rank 2  of another replica: nothing --'

Of weights that neighbors share each gives its part of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pyops.elastic.layout.layer_memory import values_of
from pyops.elastic.layout.layer_moves import LayerState
from pyops.elastic.layout.rank_layout import Layout
from pyops.elastic.layout.shared_weights import part_of, placements_of, shard_of
from pyops.flat import Placement, Shard, Shards

__all__ = ["merged_meter", "run_of", "saved", "states_of"]


def saved(
    states: Mapping[int, LayerState],
    *,
    writes: bool,
    placements: Mapping[str, Placement] | None = None,
    is_first: bool = True,
) -> dict[str, Any]:
    """{"model": {name: Shard or Shards}, "optimizer": {name: {key: likewise}}} of a rank's layers.

    Args:
        states: Of these layers.
        writes: False where another rank writes the same ones.
        placements: Of parameters that ranks share, by name.
        is_first: Whether the rank is the first of those.
    """
    places = placements or {}

    def shard(name: str, value: Any) -> Shard | Shards:
        tensor = torch.as_tensor(value)
        return shard_of(tensor, places.get(name), writes=writes, is_first=is_first)

    model = {
        name: shard(name, tensor)
        for each in states.values()
        for name, tensor in each["parameters"].items()
    }
    slots = {
        name: {key: shard(name, value) for key, value in own.items() if value is not None}
        for each in states.values()
        for name, own in each["slots"].items()
    }
    return {"model": model, "optimizer": slots}


def merged_meter(meters: Sequence[dict[str, Any] | None], layout: Layout) -> dict[str, Any]:
    """What the ranks of the first replica observed, all stages and parts of weights together.

    Args:
        meters: The state of each rank's; None of an idle one.
        layout: The present one.
    """
    active = [each for each in meters if each is not None][:: layout.context]
    several = active[: layout.stages * layout.tensor]
    squares = [sum(some) for some in zip(*(each["squares"] for each in several), strict=True)]
    return {"squares": squares, "steps": several[0]["steps"]}


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
    names, places = list(layers), placements_of(layers)
    _check(state["model"], layers, [names[number] for number in numbers], places)
    for number in numbers:
        begin = f"{names[number]}."
        parameters = {
            name: part_of(value, places.get(name))
            for name, value in state["model"].items()
            if name.startswith(begin)
        }
        slots = {
            name: {key: part_of(value, places.get(name)) for key, value in own.items()}
            for name, own in state["optimizer"].items()
            if name.startswith(begin)
        }
        found[number] = {"parameters": parameters, "slots": slots}
    return found


def _check(
    saved: Mapping[str, Any],
    layers: Mapping[str, nn.Module],
    wanted: Sequence[str],
    places: Mapping[str, Placement],
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
        if isinstance(there, Shards):  # of this rank, which may hold padding alone
            if not there.parts:
                continue
            there = there.parts[0]
        shape = there.global_shape if isinstance(there, Shard) else there.shape
        own = places[name].global_shape if name in places else tensor.shape
        if (
            tuple(shape) != tuple(own)
            or there.dtype.is_floating_point != tensor.dtype.is_floating_point
        ):
            raise ValueError(
                f"{name} is {[*shape]} {there.dtype} in the state, but {[*own]} "
                f"{tensor.dtype} here; give the model "
                "that was saved"
            )
