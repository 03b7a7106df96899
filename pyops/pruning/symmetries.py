"""Which channels of a model may change places, asked of the model, and the change itself.

    model.permutations()   ChannelSet("blocks.0.mlp.hidden", 256, (rows of up, its bias,
                                                                   columns of down))
    rearrange(model, {"blocks.0.mlp.hidden": order})      channel order[i] comes to place i

All that belongs together moves together, so that the model computes what it did, to rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import ChannelPart, ChannelSet, Placement
from pyops.ops.memory import require_memory
from pyops.pruning.masks import OWNER
from pyops.tensor_parallel import LowRank

__all__ = ["channel_sets", "columns_of", "inverse", "moves", "rearrange"]


def channel_sets(model: nn.Module) -> dict[str, ChannelSet]:
    """The channels that the model declares, by name.

    Args:
        model: With a method `permutations()`, whole on this rank.

    Raises:
        ValueError: For a model without one, one that ranks share, one with adapters.
    """
    declared = getattr(model, "permutations", None)
    if not callable(declared):
        raise ValueError(
            f"{type(model).__name__} has no permutations(): a method that returns the ChannelSets "
            "of its layers, without which nobody knows what must move together; load it as a model "
            "of pyops, or write one (docs/pruning.md)"
        )
    if any(place.size != place.global_shape for place in Placement.of(model).values()):
        raise ValueError(
            f"{type(model).__name__} is cut over ranks, and channels may move from one to another; "
            "permute the whole model, save it, and load it on any number of ranks"
        )
    if any(isinstance(module, LowRank) for module in model.modules()):
        raise ValueError("the model has adapters; merge them and take them off before permuting")
    return {found.name: found for found in declared()}


def moves(model: nn.Module, channels: ChannelSet) -> list[tuple[Tensor, ChannelPart]]:
    """Every tensor that moves, with its part, once.

    Args:
        model: Of which the parts speak.
        channels: One of its sets.
    """
    found: dict[tuple[int, int, tuple[int, ...]], tuple[Tensor, ChannelPart]] = {}
    for part in channels.parts:
        owner, _, key = part.name.rpartition(".")
        tensor = getattr(model.get_submodule(owner), key)
        place = (id(tensor), part.dim, part.starts)
        before = found.get(place)
        # A tied matrix counts as what it is besides: a table is not pruned
        if before is None or (before[1].reads and not part.reads):
            found[place] = (tensor, part)
    return list(found.values())


def columns_of(tensor: Tensor, part: ChannelPart, size: int) -> Tensor:
    """float64 magnitudes [rows, channels]: what reads the channels, one place after the other.

    Args:
        tensor: The parameter.
        part: Where channels lie in it.
        size: Number of channels.
    """
    last = tensor.detach().abs().movedim(part.dim, -1).flatten(0, -2)
    return torch.cat([last[:, at : at + size] for at in part.starts]).double()


def inverse(order: Tensor) -> Tensor:
    """The order that undoes another one.

    Args:
        order: int64 [channels].
    """
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


@torch.no_grad()
def rearrange(model: nn.Module, orders: Mapping[str, Tensor]) -> None:
    """Let channels change places, and the masks of what moves with them. The states of an optimizer
    do not follow: make it afterwards.

    Args:
        model: As of `channel_sets`.
        orders: {name of a set: int64 [channels]}, of which channel comes to each place.

    Raises:
        ValueError: Before anything is changed: for names that the model does not declare, orders
            that are no permutations, channels that have to stay.
    """
    declared = channel_sets(model)
    for name, order in orders.items():
        _check_order(name, order, declared)
    work = [
        (tensor, part, orders[name])
        for name in orders
        for tensor, part in moves(model, declared[name])
    ]
    for tensor, part, _ in work:
        if not tensor.is_floating_point():
            raise ValueError(
                f"{part.name} is {tensor.dtype}: permute and prune a model first, then calibrate "
                "and quantize it"
            )
        require_memory(tensor, part.name)
    masked: dict[int, tuple[Any, str, Tensor]] = {}
    for tensor, part, order in work:
        index = torch.arange(tensor.shape[part.dim], device=tensor.device)
        for at in part.starts:
            index[at : at + len(order)] = at + order.to(index.device)
        tensor.copy_(tensor.index_select(part.dim, index))
        if (owner := getattr(tensor, OWNER, None)) is not None:
            name = next(name for name in owner if owner.parameter(name) is tensor)
            *_, alive = masked.get(id(tensor), (owner, name, owner[name].alive()))
            moved = alive.index_select(part.dim, index.to(alive.device))
            masked[id(tensor)] = owner, name, moved
    for owner in {id(owner): owner for owner, *_ in masked.values()}.values():
        owner.update({name: alive for other, name, alive in masked.values() if other is owner})


def _check_order(name: str, order: Tensor, declared: Mapping[str, ChannelSet]) -> None:
    channels = declared.get(name)
    if channels is None:
        raise ValueError(
            f"the model declares no channels {name!r}; it has {', '.join(list(declared)[:4])} "
            f"({len(declared)} in all)"
        )
    if channels.fixed:
        raise ValueError(f"{name} can't be permuted: {channels.fixed}")
    wanted = torch.arange(channels.size)
    if order.dtype != torch.int64 or not torch.equal(order.sort().values.cpu(), wanted):
        raise ValueError(
            f"the order of {name} must be a permutation of 0 to {channels.size - 1}, int64; got "
            f"{order.dtype} {list(order.shape)}"
        )
