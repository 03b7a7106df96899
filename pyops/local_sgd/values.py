"""What a replica trains: the tensors that its optimizer steps on this process, by the names of
their parameters.

    an optimizer over a model        the parameters; their fp32 masters where they are of 16 bits
    a ZeroOptimizer                  this rank's pieces of them, or of their masters

Replicas that are shared out alike over their own ranks meet piece by piece: rank 3 of one with rank
3 of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pyops.protocols import FlatParameter, SteppedTensorsOptimizer

__all__ = ["Value", "values_of", "write_back"]


@dataclass(frozen=True)
class Value:
    """One of the tensors that an optimizer steps.

    Attributes:
        name: Of the parameter that it is, or of which it is a part.
        tensor: What is stepped: a parameter, or its fp32 master.
        copy: The parameter that is rounded from the master; None where there is no master.
    """

    name: str
    tensor: Tensor
    copy: Tensor | None = None

    @torch.no_grad()
    def write(self, value: Tensor) -> None:
        """Give it these numbers, of its shape."""
        self.tensor.copy_(value)
        if self.copy is not None:
            self.copy.copy_(self.tensor)


def _of_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Value]:
    """The parameters that are trained, and the contents of flat parameters in their place."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    chosen = {id(p) for p in stepped}
    found = []
    flats: list[Any] = [p for p in stepped if isinstance(p, FlatParameter)]
    for flat in flats:
        found += _of_flat(flat, _master_of(flat, optimizer))
    taken = {p.untyped_storage().data_ptr() for p in flats}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and id(parameter) not in chosen:
            continue
        if parameter.untyped_storage().data_ptr() in taken:
            continue
        master = _master_of(parameter, optimizer)
        if master is None:
            found.append(Value(name, parameter.detach()))
        else:
            found.append(Value(name, master, parameter.detach()))
    return found


def _master_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor | None:
    master = optimizer.state.get(parameter, {}).get("master")
    return master if isinstance(master, Tensor) and master.shape == parameter.shape else None


def _of_flat(flat: Any, master: Tensor | None) -> list[Value]:
    """The tensors of a FlatBuffer's parameter, or of its master, by name."""
    found = []
    for index, (name, shape) in enumerate(
        zip(flat.flat_layout.names, flat.flat_layout.shapes, strict=True)
    ):
        where = flat.flat_layout.slice_at(index)
        own = flat.detach()[where].view(shape)
        found.append(
            Value(name, own) if master is None else Value(name, master[where].view(shape), own)
        )
    return found


def values_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], list[Value]]:
    """What gives the values; ask it anew each time, for masters come with the first step, and
    loading replaces them."""
    if isinstance(optimizer, SteppedTensorsOptimizer):
        stepped = optimizer.stepped_tensors
        return lambda: [Value(*entry) for entry in stepped()]
    return lambda: _of_model(model, optimizer)


def write_back(optimizer: torch.optim.Optimizer) -> None:
    """Tell an optimizer over several ranks that the tensors of `values_of` were written."""
    if isinstance(optimizer, SteppedTensorsOptimizer):
        optimizer.publish_stepped()
