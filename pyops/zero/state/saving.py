"""State by parameter name, each rank's part as a range of the flattened tensor: any stage and
number of ranks reads any.

    {"state": {"head.weight": {"exp_avg": Shard([V, D], from element 98304, tensor [98304]), "step":
    Shard([], tensor [])},
               ...},
     "param_groups": [{"lr": 1e-3, ..., "params": ["head.weight", ...]}, ...]}

What a parameter has once (its `step`) is on every rank, and written by the one that owns its first
element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.buckets.reduce_axes import OwnRanks
from pyops.comm.collectives.communicator import Communicator
from pyops.flat import Placement, Shard, Shards
from pyops.protocols import ParamGroup
from pyops.zero.hooks.sharded_unit import ShardedUnit
from pyops.zero.layout.parameter_file import FileSlice, in_turn
from pyops.zero.layout.shard_range import ShardRange
from pyops.zero.update.sharded_optimizer_state import (
    ParamShard,
    ShardedOptimizerState,
    StateLoaders,
)

__all__ = [
    "check_names",
    "collect",
    "collect_model",
    "distribute",
    "distribute_model",
    "regions_of",
]


def _entries(each: ParamShard, state: Mapping[str, Any], *, replica: bool) -> dict[str, Any]:
    """One piece's states as shards."""
    shard_range = each.shard_range
    once = shard_range.start == 0 and (
        shard_range.placement is None or not any(shard_range.placement.offset)
    )
    copy = replica or (shard_range.placement is not None and not shard_range.placement.first)
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == each.parameter.shape:
            found[key] = shard_range.shards(value, copy=replica)
        elif hasattr(value, "read"):
            found[key] = shard_range.shards_elsewhere(value, copy=replica)
        elif value is not None:
            single = torch.as_tensor(value).detach()
            found[key] = Shard(
                tuple(single.shape), (0,) * single.dim(), single, copy=copy or not once
            )
    return found


def collect(
    owned: ShardedOptimizerState,
    groups: Sequence[ParamGroup],
    names: Mapping[int, str],
    *,
    everyone: Communicator | None,
) -> dict[str, Any]:
    """The state dict.

    Args:
        names: Of the users' parameters, by id.
        everyone: The data-parallel ranks; of those that hold all of a parameter's states the first
            writes them.
    """
    state: dict[str, Any] = {}
    for each in owned.all_pieces():
        replica = owned.flats[each.flat].copy(everyone)[0] > 0
        if each.piece.numel and (found := _entries(each, owned.states_of(each), replica=replica)):
            state[each.name] = found
    listed = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in groups
    ]
    return {"state": state, "param_groups": listed}


def check_names(groups: Sequence[ParamGroup], saved: Any, names: Mapping[int, str]) -> None:
    """ValueError unless the saved groups hold the parameters of the optimizer's groups."""
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise ValueError(
            'ZeroOptimizer: expected a state dict {"state": ..., "param_groups": ...}, '
            "as state_dict() gives it"
        )
    mine = [[names[id(p)] for p in group["params"]] for group in groups]
    theirs = [list(group["params"]) for group in saved["param_groups"]]
    if len(mine) != len(theirs):
        raise ValueError(
            f"ZeroOptimizer: the state has {len(theirs)} param groups, this optimizer {len(mine)}"
        )
    for number, (have, want) in enumerate(zip(theirs, mine, strict=True)):
        different = sorted({str(name) for name in have} ^ set(want))
        if different:
            raise ValueError(
                f"ZeroOptimizer: param group {number} of the state holds other "
                f"parameters than here: {different[:3]}; build "
                "the optimizer with the groups of the one that was saved"
            )


def _whole(value: Any, each: ParamShard, *, name: str) -> Tensor:
    """A state that every rank has whole, in its shape."""
    shape = tuple(value.global_shape if isinstance(value, Shard) else value.shape)
    if len(shape) != len(each.shape) or any(
        n not in (1, m) for n, m in zip(shape, each.shape, strict=True)
    ):
        raise ValueError(
            f"{name} has shape {shape} in the state, of a parameter {each.shape}; it is "
            "of another model"
        )
    if isinstance(value, Shard) and tuple(value.tensor.shape) != shape:
        raise ValueError(
            f"the state has only a part of {name}; load whole tensors, as "
            "pyops.checkpoint.load gives them"
        )
    tensor: Tensor = (
        value.read()
        if hasattr(value, "read_into")
        else value.tensor
        if isinstance(value, Shard)
        else value
    )
    return tensor.detach().clone()


def distribute(owned: ShardedOptimizerState, saved: Mapping[str, Any]) -> list[StateLoaders]:
    """What each piece of this rank takes from the state; what is on disk is compared now, and read
    when it is taken.

    Nothing is changed. ValueError names what does not fit.
    """
    everywhere = getattr(owned.optimizer, "whole_states", ())
    return [
        {
            key: _taken(value, each, key=key, whole=key in everywhere)
            for key, value in saved["state"].get(each.name, {}).items()
        }
        for each in owned.all_pieces()
    ]


def _taken(value: Any, each: ParamShard, *, key: str, whole: bool) -> Callable[[], Any]:
    """What gives the piece's part of one state, in memory of its own. whole: each rank has all of
    it."""
    name = f"state {key!r} of {each.name}"
    stored = hasattr(value, "read_into")
    if whole:
        tensor = _whole(value, each, name=name)
        return lambda: tensor
    if isinstance(value, Tensor) or stored:
        single = key == "step" or (tuple(value.shape) == () and each.shape != ())
    else:
        single = isinstance(value, Shard) and value.offset == ()
    if single:
        one = value.read() if stored else value.tensor if isinstance(value, Shard) else value
        return partial(torch.clone, one.detach().reshape(()))
    if stored or isinstance(value, Tensor | Shard | Shards):
        take = each.shard_range.find(value, name)
        return take if stored else lambda: take().clone()
    return lambda: value


def _spread(units: Sequence[ShardedUnit]) -> dict[int, tuple[Tensor, slice]]:
    """By the id of each parameter that is spread over the ranks: (this rank's piece, its elements
    of the flattened tensor)."""
    return {
        id(flat.parameters[piece.index]): (flat.piece(piece), piece.of_tensor)
        for unit in units
        for flat in unit.flats
        if flat.is_spread
        for piece in flat.partition.pieces(flat.rank)
    }


def regions_of(units: Sequence[ShardedUnit]) -> list[FileSlice]:
    """Of the parameters that are in a file."""
    return [flat.region for unit in units for flat in unit.flats if flat.region is not None]


def _read(units: Sequence[ShardedUnit]) -> dict[int, Tensor]:
    """Copies of this rank's pieces that are in a file, by the id of their parameters."""
    stored = [flat for unit in units for flat in unit.flats if flat.region is not None]
    found = {}
    for number in in_turn(regions_of(units), changed=False):
        flat = stored[number]
        for piece in flat.partition.pieces(flat.rank):
            found[id(flat.parameters[piece.index])] = flat.piece(piece).detach().clone()
    return found


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, shared ones under each of their names, and the buffers that belong into a state
    dict."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def collect_model(
    model: nn.Module,
    units: Sequence[ShardedUnit],
    everyone: Communicator | None,
    placements: Mapping[str, Placement],
    own: Mapping[int, OwnRanks],
) -> dict[str, Any]:
    """{name: the parts of a parameter that is spread, else the tensor}; a rank that has nothing of
    one leaves it out. What is in a file is read, all of it.

    Args:
        everyone: The data-parallel ranks.
        own: Of a parameter, by its id, that only some of these hold.
    """
    spread, copies, owners = _spread(units), _read(units), _placed(model, placements)
    found: dict[str, Any] = {}
    for name, tensor in _named_tensors(model).items():
        placement = owners.get(id(tensor))
        if id(tensor) in spread:
            piece, where = spread[id(tensor)]
            if piece.numel():
                found[name] = ShardRange(
                    tuple(tensor.shape), where.start, where.stop, placement
                ).shards(copies.get(id(tensor), piece.detach()))
        elif placement is not None and placement.cuts:
            over = own[id(tensor)].communicator if id(tensor) in own else everyone
            replica = over is not None and over.rank > 0
            found[name] = placement.shards(tensor.detach().reshape(-1), copy=replica)
        else:
            found[name] = tensor.detach()
    return found


def distribute_model(
    model: nn.Module,
    units: Sequence[ShardedUnit],
    state: Mapping[str, Any],
    placements: Mapping[str, Placement],
) -> list[Callable[[], None]]:
    """What fills each tensor of this rank when it is called; what is on disk is compared now, and
    read then.

    Nothing is changed.

    Raises:
        ValueError: For the state of another model.
    """
    spread, owners = _spread(units), _placed(model, placements)
    mine = _named_tensors(model)
    # A rank that has nothing of a parameter leaves it out of its own state.
    needed = {
        name
        for name, tensor in mine.items()
        if id(tensor) not in spread or spread[id(tensor)][0].numel()
    }
    if missing := sorted(needed - set(state)):
        raise ValueError(f"ZeroOptimizer: the state has no {missing[:3]}; it is of another model")
    if strange := sorted(set(state) - set(mine)):
        raise ValueError(
            f"ZeroOptimizer: the model has no {strange[:3]}, which the state has; it is "
            "of another model"
        )
    fill: list[Callable[[], None]] = []
    for name in sorted(needed):
        tensor = mine[name]
        here = id(tensor) in spread  # where it has no memory of its own
        target, where = (
            spread[id(tensor)] if here else (tensor.detach().view(-1), slice(0, tensor.numel()))
        )
        shard_range = ShardRange(
            tuple(tensor.shape), where.start, where.stop, owners.get(id(tensor))
        )
        fill.append(partial(_fill, target, shard_range.find(state[name], name)))
    return fill


def _fill(target: Tensor, take: Callable[[], Tensor]) -> None:
    target.copy_(take())


def _placed(model: nn.Module, placements: Mapping[str, Placement]) -> dict[int, Placement]:
    return {id(p): placements[name] for name, p in model.named_parameters() if name in placements}
