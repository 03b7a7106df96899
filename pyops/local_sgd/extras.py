"""What is averaged beside the parameters: buffers of the model, states of the inner optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pyops.local_sgd.config import LocalSGDConfig
from pyops.local_sgd.exchange import Exchange
from pyops.local_sgd.part import working_dtype

__all__ = ["averaged_tensors", "means_of", "reset_states"]


def averaged_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: LocalSGDConfig
) -> list[Tensor]:
    """The floating-point tensors that the configuration averages at the end of a period: buffers
    that the model saves (others are computed, and alike everywhere), and the optimizer's states but
    for fp32 masters, which are parameters."""
    found: list[Tensor] = []
    if config.buffers == "average":
        found += [
            buffer
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
        ]
    if config.states == "average":
        found += [
            value
            for state in optimizer.state.values()
            for key, value in state.items()
            if key not in ("master", "step")
            and isinstance(value, Tensor)
            and value.is_floating_point()
        ]
    return found


@torch.no_grad()
def means_of(tensors: Sequence[Tensor], exchange: Exchange) -> list[Tensor]:
    """The means of the tensors over the replicas, in new memory; the tensors stay as they are."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((working_dtype(tensor), tensor.device), []).append(place)
    found = list(tensors)
    for (dtype, _), places in groups.items():
        flat = torch.cat([tensors[place].detach().reshape(-1).to(dtype) for place in places])
        exchange.begin_mean(flat, codec=None, error=None, label="buffers and states").wait()
        parts = flat.split([tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view(tensors[place].shape)
    return found


@torch.no_grad()
def reset_states(optimizer: torch.optim.Optimizer) -> None:
    """Make every state of the inner optimizer zero, in place, but for fp32 masters."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if key == "master":
                continue
            if isinstance(value, Tensor):
                value.zero_()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                state[key] = type(value)(0)
