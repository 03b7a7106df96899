"""Placeholder: a module whose parameters lie on other ranks, and which gives zeros of the shape of
its output.

The code of the model around the blocks still runs on every stage, for its masks and its rotary
tables, which go by the shape, dtype and device of the hidden states alone.

A parameter that is tied to one of this stage, as an embedding to the head, keeps its name here: it
is the first of its names in the model, by which all ranks know it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pyops.flat import Placement

__all__ = ["Placeholder", "meta_copy"]


def meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device, which gives the shapes of its results and takes no
    memory.

    Args:
        model: Before anything is changed: what tensor parallelism has cut communicates.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=False)
        for p in model.parameters()
    }
    return copy.deepcopy(model, memo).to("meta")


class Placeholder(nn.Module):
    """Stands for a module.

    Args:
        shapes: A copy of the module on the meta device.
        device: Of the zeros.
        tied: Its own parameters that another module of this stage has too.
    """

    def __init__(
        self, shapes: nn.Module, device: torch.device, tied: dict[str, nn.Parameter] | None = None
    ) -> None:
        super().__init__()
        # Not a submodule: its parameters must not be among the model's.
        object.__setattr__(self, "_shapes", (shapes,))
        self._device = device
        self.placements: dict[str, Placement] = {}
        # register_parameter would find the replaced module's own under the name.
        self._parameters.update(tied or {})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros as what the module would return."""
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        with torch.no_grad():
            output = self.__dict__["_shapes"][0](*args, **kwargs)
        return tree_map(self._zeros, output)

    def _zeros(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.zeros(value.shape, dtype=value.dtype, device=self._device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_shapes"][0], name)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
