"""States of an optimizer between a Trainer whose layers are cut and one whose layers are whole.

    tp = 1   Conv1D.weight, its states     [D, 3 * heads * K]       as transformers has them
    tp > 1   ColumnParallelLinear.weight   [3, heads * K, D]        what ranks can share out

A checkpoint says which of the two it holds, for a square matrix looks the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from pyops import tensor_parallel
from pyops.hub.pretrained import empty_like_config
from pyops.hub.pretrained.layouts import RelaidTensor, placement_of, whole_shape
from pyops.mesh import ALONE
from pyops.tensor_parallel.convert.module_swap import laid_back, laid_out

__all__ = ["CUT", "WHOLE", "states_laid_back", "states_laid_out"]

CUT, WHOLE = "cut", "whole"  # how layers lie in a checkpoint
States = Mapping[str, Mapping[str, Any]]  # {name of a parameter: {name of a state: value}}


def states_laid_out(states: States, model: nn.Module) -> dict[str, dict[str, Any]]:
    """States of whole layers as those of a model whose layers are cut.

    Args:
        states: As `pyops.checkpoint.load` reads them; tensors may be on the disk still.
        model: With layers that are cut.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, module, key in _owners(model, states):
        place = placement_of(module, key)
        whole = whole_shape(module, key, module.get_parameter(key))
        of_parameter = found[name] = dict(states[name])
        for state, value in of_parameter.items():
            if place is not None and tuple(getattr(value, "shape", ())) == whole:
                read = partial(_laid_out, value, module, place)
                of_parameter[state] = RelaidTensor(read, place.global_shape, value.dtype)
    return found


def states_laid_back(
    states: States, model: nn.Module, plan: Mapping[str, str] | None
) -> dict[str, dict[str, Any]]:
    """States of layers that were cut as those of a model with whole layers.

    Args:
        states: As `pyops.checkpoint.load` reads them; tensors may be on the disk still.
        model: Of transformers, with whole layers.
        plan: By which they were cut; None: that of the model's class.

    Raises:
        ValueError: No plan is known for the class.
    """
    cut: Any = empty_like_config(type(model), model.config)
    tensor_parallel.parallelize(cut, group=ALONE, plan=plan, check=False)
    found: dict[str, dict[str, Any]] = {}
    for name, module, key in _owners(cut, states):
        place = placement_of(module, key)
        whole = whole_shape(module, key, module.get_parameter(key))
        of_parameter = found[name] = dict(states[name])
        for state, value in of_parameter.items():
            if place is not None and tuple(getattr(value, "shape", ())) == place.global_shape:
                read = partial(_laid_back, value, module)
                of_parameter[state] = RelaidTensor(read, whole, value.dtype)
    return found


def _owners(model: nn.Module, names: Any) -> list[tuple[str, nn.Module, str]]:
    """(name, module, name in it) of the parameters of these names.

    Raises:
        ValueError: The model has no parameter of such a name.
    """
    found = {
        f"{path}.{key}" if path else key: (module, key)
        for path, module in model.named_modules(remove_duplicate=False)
        for key, p in module._parameters.items()
        if p is not None
    }
    if strange := sorted(set(names) - set(found)):
        raise ValueError(
            f"the checkpoint has states of {', '.join(strange[:3])}, which "
            f"{type(model).__name__} has not; choose the checkpoint of this model"
        )
    return [(name, *found[name]) for name in names]


def _read(value: Any) -> Tensor:
    found: Tensor = value.read() if hasattr(value, "read") else value
    return found


def _laid_out(value: Any, module: nn.Module, place: Any) -> Tensor:
    return laid_out(module, _read(value), place)


def _laid_back(value: Any, module: nn.Module) -> Tensor:
    return laid_back(module, _read(value)).contiguous()
