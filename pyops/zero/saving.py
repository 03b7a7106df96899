"""State by parameter name, each rank's part as a range of the flattened tensor: any stage and number of ranks reads any.

    {"state": {"head.weight": {"exp_avg": Shard([V, D], from element 98304, tensor [98304]), "step": Shard([], tensor [])},
               ...},
     "param_groups": [{"lr": 1e-3, ..., "params": ["head.weight", ...]}, ...]}

What a parameter has once (its `step`) is written by the rank that owns its first element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.comm.communicator import Communicator
from pyops.flat import Shard, Shards
from pyops.zero.gathering import Unit
from pyops.zero.owned import Owned, OwnedPiece

__all__ = ["check_names", "collect", "collect_model", "distribute", "distribute_model", "range_of"]

Group = dict[str, Any]


def range_of(value: Any, shape: Sequence[int], *, start: int, stop: int, name: str) -> Tensor:
    """Elements [start, stop) of the flattened tensor, given it whole, or ranges of it; ValueError where some are missing."""
    if isinstance(value, Tensor):
        if tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)} in the state, here {tuple(shape)}; it is of another model")
        return value.detach().reshape(-1)[start:stop]
    if hasattr(value, "read_into"):  # a tensor of a checkpoint that is still on disk
        if tuple(value.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)} in the state, here {tuple(shape)}; it is of another model")
        mine = torch.empty(stop - start, dtype=value.dtype)
        if start < stop:
            value.compare(Shard(tuple(shape), (start,), mine))
            value.read_into(Shard(tuple(shape), (start,), mine))
        return mine
    parts = [value] if isinstance(value, Shard) else list(value)
    found: list[tuple[int, Tensor]] = []
    for shard in parts:
        if tuple(shard.global_shape) != tuple(shape) or len(shard.offset) != 1 or shard.tensor.dim() != 1:
            raise ValueError(
                f"{name} is a shard of {tuple(shard.global_shape)} at {shard.offset} in the state; expected ranges of a "
                f"flattened tensor of {tuple(shape)}: load whole tensors, as pyops.checkpoint.load gives them"
            )
        low, high = max(start, shard.offset[0]), min(stop, shard.offset[0] + shard.tensor.numel())
        if low < high:
            found.append((low, shard.tensor.detach()[low - shard.offset[0] : high - shard.offset[0]]))
    found.sort(key=lambda pair: pair[0])
    at = start
    for low, tensor in found:
        if low != at:
            break
        at += tensor.numel()
    if at != stop or sum(t.numel() for _, t in found) != stop - start:
        raise ValueError(
            f"the state has only a part of elements {start} to {stop} of {name}, which this rank owns; load whole tensors, as "
            "pyops.checkpoint.load gives them"
        )
    return found[0][1] if len(found) == 1 else torch.cat([t for _, t in found]) if found else torch.empty(0)


def _entries(each: OwnedPiece, state: Mapping[str, Any]) -> dict[str, Any]:
    """One piece's states as shards."""
    start = each.piece.of_tensor.start
    found: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == each.parameter.shape:
            found[key] = Shard(each.shape, (start,), value)
        elif value is not None and start == 0:
            once = torch.as_tensor(value).detach()
            found[key] = Shard(tuple(once.shape), (0,) * once.dim(), once)
    return found


def collect(owned: Owned, groups: Sequence[Group], names: Mapping[int, str]) -> dict[str, Any]:
    """The state dict. names: of the users' parameters, by id."""
    state: dict[str, Any] = {}
    for each in owned.all_pieces():
        if each.piece.numel and (found := _entries(each, owned.states_of(each))):
            state[each.name] = found
    listed = [
        {**{key: value for key, value in group.items() if key != "params"}, "params": [names[id(p)] for p in group["params"]]}
        for group in groups
    ]
    return {"state": state, "param_groups": listed}


def check_names(groups: Sequence[Group], saved: Any, names: Mapping[int, str]) -> None:
    """ValueError unless the saved groups hold the parameters of the optimizer's groups."""
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise ValueError('ZeroOptimizer: expected a state dict {"state": ..., "param_groups": ...}, as state_dict() gives it')
    mine = [[names[id(p)] for p in group["params"]] for group in groups]
    theirs = [list(group["params"]) for group in saved["param_groups"]]
    if len(mine) != len(theirs):
        raise ValueError(f"ZeroOptimizer: the state has {len(theirs)} param groups, this optimizer {len(mine)}")
    for number, (have, want) in enumerate(zip(theirs, mine, strict=True)):
        different = sorted({str(name) for name in have} ^ set(want))
        if different:
            raise ValueError(
                f"ZeroOptimizer: param group {number} of the state holds other parameters than here: {different[:3]}; build "
                "the optimizer with the groups of the one that was saved"
            )


def _whole(value: Any, each: OwnedPiece, *, name: str) -> Tensor:
    """A state that every rank has whole, in its shape."""
    shape = tuple(value.global_shape if isinstance(value, Shard) else value.shape)
    if len(shape) != len(each.shape) or any(n not in (1, m) for n, m in zip(shape, each.shape, strict=True)):
        raise ValueError(f"{name} has shape {shape} in the state, of a parameter {each.shape}; it is of another model")
    if isinstance(value, Shard) and tuple(value.tensor.shape) != shape:
        raise ValueError(f"the state has only a part of {name}; load whole tensors, as pyops.checkpoint.load gives them")
    tensor: Tensor = value.read() if hasattr(value, "read_into") else value.tensor if isinstance(value, Shard) else value
    return tensor.detach().clone()


def distribute(owned: Owned, saved: Mapping[str, Any]) -> tuple[dict[int, dict[str, Any]], dict[int, Tensor]]:
    """({number of the inner parameter: its states}, {number: its master, where that is the parameter itself}).

    Nothing is changed. ValueError names what does not fit.
    """
    states: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    everywhere = getattr(owned.optimizer, "whole_states", ())
    for number, each in enumerate(owned.all_pieces()):
        where = each.piece.of_tensor
        found: dict[str, Any] = {}
        for key, value in saved["state"].get(each.name, {}).items():
            label = f"state {key!r} of {each.name}"
            stored = hasattr(value, "read_into")
            if key in everywhere:
                found[key] = _whole(value, each, name=label)
                continue
            if isinstance(value, Tensor) or stored:
                single = key == "step" or (tuple(value.shape) == () and each.shape != ())
            else:
                single = isinstance(value, Shard) and value.offset == ()
            if single:
                whole = value.read() if stored else value.tensor if isinstance(value, Shard) else value
                found[key] = whole.detach().clone().reshape(())
            elif stored or isinstance(value, Tensor | Shard | Shards):
                found[key] = range_of(value, each.shape, start=where.start, stop=where.stop, name=label).clone()
            else:
                found[key] = value
        if each.target is not None and "master" in found:
            masters[number] = found.pop("master")
        if found:
            states[number] = found
    return states, masters


def _spread(units: Sequence[Unit], communicator: Communicator | None) -> dict[int, tuple[Tensor, slice]]:
    """By the id of each parameter that is spread over the ranks: (this rank's piece, its elements of the flattened tensor)."""
    if communicator is None:
        return {}
    return {
        id(flat.parameters[piece.index]): (flat.piece(piece), piece.of_tensor)
        for unit in units
        for flat in unit.flats
        for piece in flat.partition.pieces(flat.rank)
    }


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, shared ones under each of their names, and the buffers that belong into a state dict."""
    found: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def collect_model(model: nn.Module, units: Sequence[Unit], communicator: Communicator | None) -> dict[str, Any]:
    """{name: Shard of a parameter that is spread, else the tensor}; a rank that has nothing of a parameter leaves it out."""
    spread = _spread(units, communicator)
    found: dict[str, Any] = {}
    for name, tensor in _named_tensors(model).items():
        if id(tensor) not in spread:
            found[name] = tensor.detach()
        else:
            piece, where = spread[id(tensor)]
            if piece.numel():
                found[name] = Shard(tuple(tensor.shape), (where.start,), piece.detach())
    return found


def distribute_model(
    model: nn.Module, units: Sequence[Unit], communicator: Communicator | None, state: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """(tensor of this rank, value for it) pairs; ValueError for the state of another model. Nothing is changed."""
    spread = _spread(units, communicator)
    mine = _named_tensors(model)
    # A rank that has nothing of a parameter leaves it out of its own state.
    needed = {name for name, tensor in mine.items() if id(tensor) not in spread or spread[id(tensor)][0].numel()}
    if missing := sorted(needed - set(state)):
        raise ValueError(f"ZeroOptimizer: the state has no {missing[:3]}; it is of another model")
    if strange := sorted(set(state) - set(mine)):
        raise ValueError(f"ZeroOptimizer: the model has no {strange[:3]}, which the state has; it is of another model")
    copies = []
    for name in sorted(needed):
        tensor = mine[name]
        target, where = spread.get(id(tensor), (tensor.detach().view(-1), slice(0, tensor.numel())))
        copies.append((target, range_of(state[name], tensor.shape, start=where.start, stop=where.stop, name=name)))
    return copies
