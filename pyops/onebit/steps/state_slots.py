"""One flat fp32 tensor under a state of all parameters, so that one collective carries it whatever
their number.

parameters   | embed.weight | block.0.weight | ...          many, or one over a FlatBuffer, in
                                                            several groups
flat         | embed.weight |pad| block.0.weight |pad| ...  offsets are multiples of ALIGNMENT
state        exp_avg = a view of the flat tensor with the parameter's shape and strides
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import torch
from torch import Tensor

from pyops.flat import ALIGNMENT, FlatLayout
from pyops.protocols import ParamGroup

__all__ = ["StateSlot", "StateSlots"]


class StateSlot:
    """Where the parameter param_groups[group]["params"][index] lies in flat tensors."""

    def __init__(self, group: int, index: int, parameter: Tensor, start: int) -> None:
        self.group, self.index, self.parameter, self.start = group, index, parameter, start
        self.stop = start + parameter.numel()
        # Dense, in the order of the parameter's memory, as torch.zeros_like makes states.
        self._strides = torch.empty_like(parameter).stride()

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part, with its shape and strides."""
        return flat[self.start : self.stop].as_strided(self.parameter.shape, self._strides)


class StateSlots:
    """All slots, and the layout by names: of a parameter's `flat_layout` where it has one, else
    `param_names`' or "0.3".

    Args:
        moved: The parameters that have a slot; others, which never had a gradient, stay as they
            are.
    """

    def __init__(self, groups: Sequence[ParamGroup], *, moved: Container[Tensor]) -> None:
        self._all: list[StateSlot] = []
        names: list[str] = []
        shapes: list[tuple[int, ...]] = []
        offsets: list[int] = []
        end = 0
        for g, group in enumerate(groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in moved:
                    continue
                start = -(-end // ALIGNMENT) * ALIGNMENT
                end = start + parameter.numel()
                self._all.append(StateSlot(g, i, parameter, start))
                inner: FlatLayout | None = getattr(parameter, "flat_layout", None)
                if inner is not None and inner.numel == parameter.numel():
                    names += inner.names
                    shapes += inner.shapes
                    offsets += [start + offset for offset in inner.offsets]
                else:
                    names.append(
                        group["param_names"][i] if group.get("param_names") else f"{g}.{i}"
                    )
                    shapes.append(tuple(parameter.shape))
                    offsets.append(start)
        if len(set(names)) != len(names):  # two models in one optimizer
            names = [f"{k}.{name}" for k, name in enumerate(names)]
        self.layout = FlatLayout(tuple(names), tuple(shapes), tuple(offsets), end)

    def __iter__(self) -> Iterator[StateSlot]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def zeros(self) -> Tensor:
        return torch.zeros(
            self.layout.numel, dtype=torch.float32, device=self._all[0].parameter.device
        )

    def gather(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """A new flat tensor of the tensors, one for each slot; zeros for None and for padding."""
        flat = self.zeros()
        for slot, tensor in zip(self._all, tensors, strict=True):
            if tensor is not None:
                slot.view(flat).copy_(tensor)
        return flat

    def lie_in(self, flat: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether every tensor is its slot's view of `flat`."""
        return all(
            tensor.dtype == flat.dtype and tensor.data_ptr() == flat.data_ptr() + 4 * slot.start
            for slot, tensor in zip(self._all, tensors, strict=True)
        )
