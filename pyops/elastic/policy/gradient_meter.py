"""Meter: the gradient norm of each layer, averaged over the steps since the last decision.

after backward, each step:  meter.observe()         squares of each layer's gradients, added up on
                                                    their device
at a decision:              meter.take(group=...)   sqrt(mean of squares) of each layer; and begins
                                                    anew
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pyops.comm.agreement import gather

__all__ = ["Meter"]


class Meter:
    """Norms of the gradients of layers, for a policy.

    Args:
        layers: For each layer a module, its parameters, or their names; a rank of a pipeline gives
            an empty list for those that others hold. Of a parameter counts `main_grad` where it has
            one that is filled, else `grad`; none counts as zero, as that of a frozen layer. With
            names, `observe` is given the squares: `ZeroOptimizer.gradient_squares()` tells them,
            which leaves no gradient on the parameters.
    """

    def __init__(self, layers: Sequence[nn.Module | Iterable[Tensor] | Iterable[str]]) -> None:
        if not len(layers):
            raise ValueError(
                "there are no layers to measure; give those that may be frozen, from the lowest"
            )
        self._layers: list[list[Any]] = [
            list(each.parameters()) if isinstance(each, nn.Module) else list(each)
            for each in layers
        ]
        self._named = any(isinstance(p, str) for layer in self._layers for p in layer)
        device = next(
            (p.device for layer in self._layers for p in layer if isinstance(p, Tensor)),
            torch.device("cpu"),
        )
        self._squares = torch.zeros(len(self._layers), dtype=torch.float64, device=device)
        self._steps = torch.zeros((), dtype=torch.float64, device=device)

    def observe(
        self, squares: Mapping[str, Tensor] | None = None, *, scale: float | Tensor = 1.0
    ) -> None:
        """Add the gradients that are there now: after backward and reduction, before they are
        zeroed. Waits for no device.

        Args:
            squares: By name, where the layers are names; a name that is not there counts as zero.
            scale: What the gradients are multiplied with, such as the loss scale. A step with a
                gradient that is not finite counts nothing.

        Raises:
            ValueError: For layers of names without squares, or of parameters with them, and for
                squares of none of the names.
        """
        if squares is not None or self._named:
            found = self._squares_of(squares)
        else:
            found = torch.stack([self._square(layer) for layer in self._layers])
        if isinstance(scale, Tensor):
            scale = scale.to(found)
        found = found / scale**2
        sound = torch.isfinite(found).all()
        self._squares += torch.where(sound, found, 0.0)
        self._steps += sound

    @property
    def steps(self) -> int:
        """How many were measured since the last decision."""
        return int(self._steps.item())

    def _squares_of(self, named: Mapping[str, Tensor] | None) -> Tensor:
        """Each layer's, of those that are told by name."""
        names = [name for layer in self._layers for name in layer]
        if named is None or (names and not self._named):
            have = (
                "names of parameters, so observe() needs their squares"
                if named is None
                else "parameters, not names"
            )
            raise ValueError(
                f"the layers were given as {have}; Meter([names of layer 0, ...]) goes "
                "with observe(squares)"
            )
        if names and not any(name in named for name in names):
            raise ValueError(
                f"there are squares of {', '.join(named) or 'nothing'}, but the layers "
                f"have {names[0]}, ..."
            )
        if named and (device := next(iter(named.values())).device) != self._squares.device:
            self._squares, self._steps = self._squares.to(device), self._steps.to(device)
        nothing = self._squares.new_zeros(())
        return torch.stack(
            [
                sum((named[name] for name in layer if name in named), nothing)
                for layer in self._layers
            ]
        )

    def _square(self, layer: Iterable[Tensor]) -> Tensor:
        gradients = [g for p in layer if (g := _gradient(p)) is not None]
        if not gradients:
            return self._squares.new_zeros(())
        norms = [
            torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32))
            for g in gradients
        ]
        return torch.stack([norm.to(self._squares) for norm in norms]).square().sum()

    def take(self, *, group: dist.ProcessGroup | None = None, shared: bool = False) -> list[float]:
        """The norms since the last call, and begin anew.

        Args:
            shared: Layers, or parts of them, are shared out over the ranks of `group` (a
                pipeline's, tensor parallel ranks'): means of squares are summed over it, in the
                order of ranks; all of them call it and have the same norms afterwards. A parameter
                that several of them hold whole must then be given by one alone.

        Raises:
            ValueError: On every rank alike, if a rank has no step that it measured.
        """
        mine = [*self._squares.tolist(), self._steps.item()]
        all_of = gather(mine, group=group) if shared else [mine]
        self.reset()
        if (
            rank := next((rank for rank, each in enumerate(all_of) if not each[-1]), None)
        ) is not None:
            whose = f"rank {rank} measured no step" if shared else "no step was measured"
            raise ValueError(
                f"{whose} with finite gradients since the last decision; call observe() "
                "after backward"
            )
        means = [[square / each[-1] for square in each[:-1]] for each in all_of]
        return [math.sqrt(math.fsum(squares)) for squares in zip(*means, strict=True)]

    def reset(self) -> None:
        """Forget what was observed."""
        self._squares.zero_()
        self._steps.zero_()

    def state_dict(self) -> dict[str, Any]:
        """What was observed since the last decision: {"squares": list, "steps": float}."""
        return {"squares": self._squares.tolist(), "steps": self._steps.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: For another number of layers.
        """
        if len(state["squares"]) != len(self._layers):
            raise ValueError(
                f"the state is of {len(state['squares'])} layers, but there are {len(self._layers)}"
            )
        self._squares.copy_(torch.tensor(state["squares"], dtype=torch.float64, device="cpu"))
        self._steps.fill_(state["steps"])


def _gradient(parameter: Tensor) -> Tensor | None:
    if not parameter.requires_grad:
        return None
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
