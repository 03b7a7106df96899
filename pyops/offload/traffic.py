"""How a tile's parameters and gradients come to the processor that steps them, and back.

    in host memory   they are there: views
    on a GPU         gradients and parameters of tile k + 1 come down while tile k is stepped, and
                     those of tile k - 1 go up

The copies use pinned memory and streams of their own. Ren et al., ZeRO-Offload, arXiv:2101.06840,
section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pyops.offload.tiles import Segment

__all__ = ["Far", "Loaded", "Near"]


class Loaded(NamedTuple):
    """A segment on its way to be stepped.

    Attributes:
        parameter: None where its values are a state.
        gradient: None where there is none.
    """

    segment: Segment
    parameter: Tensor | None
    gradient: Tensor | None


class Near:
    """Parameters in host memory. targets[i]: where parameter i's values are rounded to, when they
    are a state; else None. gradients[i]: of the step that is under way."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], targets: Sequence[Tensor | None]
    ) -> None:
        self.parameters, self.targets = parameters, targets
        self.gradients: Sequence[Tensor | None] = []

    def fetch(self, segments: Sequence[Segment]) -> list[Loaded]:
        """Begin to bring the segments' tensors to the host."""
        return [Loaded(segment, *self._sources(segment)) for segment in segments]

    def arrive(self, loaded: list[Loaded]) -> None:
        """Wait until what was fetched is there."""

    def send(self, loaded: Loaded, values: Tensor) -> None:
        """Begin to bring a stepped segment back."""
        target = self.targets[loaded.segment.parameter]
        if target is not None:
            target.view(-1)[loaded.segment.start : loaded.segment.stop].copy_(values)

    def finish(self) -> None:
        """Everything that was sent is there for whatever the device does next."""

    def _sources(self, segment: Segment) -> tuple[Tensor | None, Tensor | None]:
        parameter, place = self.parameters[segment.parameter], slice(segment.start, segment.stop)
        gradient = self.gradients[segment.parameter]
        if gradient is None:  # the parameter stays as it is, and may have no memory now
            return None, None
        values = (
            None
            if self.targets[segment.parameter] is not None
            else parameter.detach().view(-1)[place]
        )
        return values, gradient.view(-1)[place]


class Far(Near):
    """Parameters on a CUDA device."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        targets: Sequence[Tensor | None],
        device: torch.device,
    ) -> None:
        super().__init__(parameters, targets)
        self.device = device
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._events: dict[int, Any] = {}

    def fetch(self, segments: Sequence[Segment]) -> list[Loaded]:
        self._down.wait_stream(torch.cuda.current_stream(self.device))
        loaded = []
        with torch.cuda.stream(self._down):
            for segment in segments:
                here = [
                    None if t is None else _pinned_like(t).copy_(t, non_blocking=True)
                    for t in self._sources(segment)
                ]
                loaded.append(Loaded(segment, here[0], here[1]))
            self._events[id(loaded)] = self._down.record_event()
        return loaded

    def arrive(self, loaded: list[Loaded]) -> None:
        self._events.pop(id(loaded)).synchronize()

    def send(self, loaded: Loaded, values: Tensor) -> None:
        segment = loaded.segment
        target = self.targets[segment.parameter]
        there = self.parameters[segment.parameter].detach() if target is None else target
        if (
            loaded.parameter is None or values.dtype != there.dtype or not values.is_pinned()
        ):  # a tile is used again soon
            values = torch.empty(
                values.shape, dtype=there.dtype, pin_memory=True, device="cpu"
            ).copy_(values)
        with torch.cuda.stream(self._up):
            there.view(-1)[segment.start : segment.stop].copy_(values, non_blocking=True)

    def finish(self) -> None:
        torch.cuda.current_stream(self.device).wait_stream(self._up)


def _pinned_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
