"""Which layers have memory on this rank: those of its stage; the others are on the meta device,
shapes without values.

layout        embedding block 0 block 1 | block 2 block 3 head    rank 0 of 2 holds the first three
next layout   embedding block 0 block 1   block 2 block 3 head    take() fills the other three
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["Initialize", "drop_memory", "freeze", "is_held", "lacks_tables", "take", "values_of"]

Initialize = Callable[
    [str, nn.Module], None
]  # (name of the layer in the model, layer): fills it with its first values


def values_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and the buffers that a state_dict has, by their names in the layer: what differs
    from rank to rank. Others, a table of positions, say, which layers may share, are on every
    rank."""
    return {name: tensor.detach() for name, tensor in layer.state_dict(keep_vars=True).items()}


def is_held(layer: nn.Module) -> bool:
    """Whether it has memory; a layer without tensors has."""
    return not any(tensor.is_meta for tensor in values_of(layer).values())


def lacks_tables(layer: nn.Module) -> bool:
    """Whether it has buffers without memory that no state_dict has: what nobody can send."""
    kept = values_of(layer)
    return any(buffer.is_meta and name not in kept for name, buffer in layer.named_buffers())


@torch.no_grad()
def take(
    layer: nn.Module,
    values: Mapping[str, Tensor] | None,
    *,
    device: torch.device,
    initialize: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give a layer memory on `device`, and these values by its own names of them; None: those that
    it has, or its first ones.

    Args:
        initialize: Fills a layer that has none, and tables, which nobody can send.
    """
    if values is None and is_held(layer):
        values = {name: tensor.clone() for name, tensor in values_of(layer).items()}
    first = values is None or lacks_tables(layer)
    _replace(
        layer,
        lambda tensor, lasting: torch.empty_like(tensor, device=device) if tensor.is_meta else None,
    )
    if first and initialize is not None:
        initialize(layer)
    if values is not None:
        for name, tensor in values_of(layer).items():
            tensor.copy_(values[name])


def drop_memory(layer: nn.Module) -> None:
    """Free a layer's memory."""
    _replace(
        layer, lambda tensor, lasting: tensor.to("meta") if lasting and not tensor.is_meta else None
    )


def _replace(layer: nn.Module, change: Callable[[Tensor, bool], Tensor | None]) -> None:
    """Put what `change` makes of each tensor, None for nothing, in its place; one that is there
    twice stays one. It is told whether the tensor is in a state_dict. Gradients go."""
    made: dict[
        int, tuple[Tensor, Tensor | None]
    ] = {}  # with the old one, whose id is not to be another's meanwhile

    def new(tensor: Tensor, lasting: bool) -> Tensor | None:
        if id(tensor) not in made:
            found = change(tensor.detach(), lasting)
            if found is not None and isinstance(tensor, nn.Parameter):
                found = nn.Parameter(found, requires_grad=tensor.requires_grad)
                found.__dict__.update(tensor.__dict__)
            made[id(tensor)] = (tensor, found)
        return made[id(tensor)][1]

    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (found := new(parameter, True)) is not None:
                assert isinstance(found, nn.Parameter)
                module._parameters[name] = found
        for name, buffer in module._buffers.items():
            if (
                buffer is not None
                and (found := new(buffer, name not in module._non_persistent_buffers_set))
                is not None
            ):
                module._buffers[name] = found


@torch.no_grad()
def freeze(layer: nn.Module) -> None:
    """No gradients and no dropout from now on, and memory of its own: a view would keep what it was
    a part of."""
    layer.eval()
    for parameter in layer.parameters():
        parameter.grad = None
        parameter.requires_grad_(False)
        parameter.data = parameter.data.clone()
