"""What is refused before anything changes, at every replica alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pyops.flat.dtensor import is_dtensor
from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange
from pyops.local_sgd.fragments import fragment_of_layer, layer_of, layers_of
from pyops.local_sgd.values import Value, values_of
from pyops.protocols import CommunicatingOptimizer, FlatParameter, SteppedTensorsOptimizer

__all__ = ["agree_on_setup"]

TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def agree_on_setup(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: LocalSGDConfig,
    exchange: Exchange,
) -> None:
    """Check each replica's own arguments, and that they are those of the others. Collective.

    Raises:
        ValueError, TypeError: On every replica, for what any of them was given.
    """
    error: Exception | None = None
    found: list[tuple[object, ...]] = []
    try:
        found = _checked(model, optimizer, config, exchange.size)
    except (TypeError, ValueError) as caught:
        error = caught
    exchange.agree(error)
    codec = config.wire_codec
    described = (repr(config), codec.name if codec else "none", found)
    first, *others = exchange.gather(described)
    for number, other in enumerate(others, start=1):
        if other == first:
            continue
        if other[:2] != first[:2]:
            raise ValueError(
                f"LocalSGD: replica 0 was given {first[0]}, replica {number} {other[0]}; give all "
                "replicas the same configuration"
            )
        pairs = zip(first[2], other[2], strict=False)
        difference = next(
            (f"replica 0 trains {a} where replica {number} trains {b}" for a, b in pairs if a != b),
            f"replica 0 trains {len(first[2])} tensors, replica {number} {len(other[2])}",
        )
        raise ValueError(
            f"LocalSGD: the replicas' models differ: {difference}; build the same model everywhere"
        )


def _checked(
    model: object, optimizer: object, config: object, replicas: int
) -> list[tuple[object, ...]]:
    """(name, shape, dtype, fragment) of everything that is exchanged."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"LocalSGD: model is a {type(model).__name__}; expected an nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"LocalSGD: optimizer is a {type(optimizer).__name__}; expected the optimizer that "
            "steps the model's parameters"
        )
    if not isinstance(config, LocalSGDConfig):
        raise TypeError(f"LocalSGD: config is a {type(config).__name__}; expected a LocalSGDConfig")
    _check_optimizer(model, optimizer)
    if config.method == "easgd" and config.alpha * replicas > 1:
        raise ValueError(
            f"LocalSGD: alpha is {config.alpha} with {replicas} replicas, which pull the center "
            f"{config.alpha * replicas:g} times the way to their mean; set alpha to "
            f"{1 / replicas:g} or less, or to 0 for 0.9 / replicas"
        )
    values = values_of(model, optimizer)()
    if not values:
        raise ValueError(
            "LocalSGD: nothing of the model is trained, so there is nothing to exchange; give an "
            "optimizer over parameters with requires_grad=True"
        )
    for value in values:
        _check_value(value, config)
    fragment_of = fragment_of_layer(
        layers_of(name for name, _ in model.named_parameters()), fragments=config.fragments
    )
    _check_tied(values, fragment_of)
    return [
        (v.name, tuple(v.tensor.shape), str(v.tensor.dtype), fragment_of[layer_of(v.name)])
        for v in values
    ]


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SteppedTensorsOptimizer):
        return
    if isinstance(optimizer, CommunicatingOptimizer):
        raise ValueError(
            f"LocalSGD: optimizer is a {type(optimizer).__name__}, which sends momenta to all "
            "ranks at every step, while replicas are to step on their own; use AdamW"
        )
    own = {id(p) for p in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own and not isinstance(parameter, FlatParameter):
                raise ValueError(
                    f"LocalSGD: the optimizer steps a tensor of shape {tuple(parameter.shape)} "
                    "that is no parameter of the model, so replicas would drift apart in it; make "
                    "the optimizer of this model's parameters"
                )


def _check_value(value: Value, config: LocalSGDConfig) -> None:
    tensor = value.tensor
    if is_dtensor(tensor):
        raise TypeError(
            f"LocalSGD: {value.name} is a DTensor; use ZeroOptimizer within a replica, whose parts "
            "it exchanges"
        )
    if tensor.is_meta:
        raise ValueError(
            f"LocalSGD: {value.name} is on the meta device; materialize the model first"
        )
    if tensor.dtype not in TRAINED or tensor.layout != torch.strided:
        raise TypeError(
            f"LocalSGD: {value.name} is {tensor.dtype}, {tensor.layout}; expected a dense tensor "
            "of float32, bfloat16, float16 or float64"
        )
    codec = config.wire_codec
    if tensor.dtype == torch.float64 and codec is not None:
        raise TypeError(
            f"LocalSGD: {value.name} is torch.float64, which {codec.name} can't compress; use "
            'float32, or codec="none"'
        )


def _check_tied(values: Sequence[Value], fragment_of: dict[str, int]) -> None:
    """ValueError for tensors over the same memory in two fragments: the second exchange would undo
    the first."""
    first: dict[int, Value] = {}
    for value in values:
        if not value.tensor.numel():
            continue
        other = first.setdefault(value.tensor.data_ptr(), value)
        places = [fragment_of[layer_of(each.name)] for each in (other, value)]
        if places[0] != places[1]:
            raise ValueError(
                f"LocalSGD: {other.name} and {value.name} are one tensor, but in fragments "
                f"{places[0]} and {places[1]}; tie them as one parameter, or set fragments to 1"
            )
