"""Which layers have memory on this rank: those of its stage; the others are on the meta device, shapes without values.

layout        embedding block 0 block 1 | block 2 block 3 head        rank 0 of 2: three layers held, three without memory
next layout   embedding block 0 block 1   block 2 block 3 head        take(): three get memory, and the values that came
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

__all__ = ["Initialise", "freeze", "is_held", "let_go", "take", "values_of"]

Initialise = Callable[[str, nn.Module], None]  # (name of the layer in the model, layer): fills it with its first values


def is_held(layer: nn.Module) -> bool:
    """Whether it has memory; a layer without tensors has."""
    return not any(tensor.is_meta for tensor in [*layer.parameters(), *layer.buffers()])


def values_of(layer: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that no state_dict has as well, by their names in the layer; but not what a dropout was
    told of the next forward."""
    told = {id(module._buffers.get("state")) for module in layer.modules() if hasattr(module, "take_state")}
    everything = (*layer.named_parameters(), *layer.named_buffers())
    return {name: tensor.detach() for name, tensor in everything if id(tensor) not in told}


@torch.no_grad()
def take(layer: nn.Module, values: Mapping[str, Tensor] | None, *, device: torch.device) -> None:
    """Give a layer memory on `device`, and these values by its own names of them; None: as they come."""
    if not is_held(layer):
        layer.to_empty(device=device)
    if values is not None:
        for name, tensor in values_of(layer).items():
            tensor.copy_(values[name])


def let_go(layer: nn.Module) -> None:
    """Free a layer's memory."""
    for parameter in layer.parameters():
        parameter.grad = None
    layer.to("meta")


@torch.no_grad()
def freeze(layer: nn.Module) -> None:
    """No gradients and no dropout from now on, and memory of its own: a view would keep what it was a part of."""
    layer.eval()
    for parameter in layer.parameters():
        parameter.grad = None
        parameter.requires_grad_(False)
        parameter.data = parameter.data.clone()
