"""What an optimizer keeps for a parameter, and whether it steps each element by itself: found out
by two small steps.

a parameter of 96 elements, whole    step, step   its states have these names and dtypes
the same in two parts of 32 and 64   step, step   the same numbers? if not, a tile can't be stepped
                                                  alone
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyops.protocols import ParamGroup

__all__ = ["rehearse", "standing_in"]

STATES_OF_ITS_OWN = ("offsets", "copies", "params", "param_names")
NUMEL = 96


@contextmanager
def standing_in(
    optimizer: torch.optim.Optimizer, groups: list[ParamGroup], state: Mapping[Any, Any]
) -> Iterator[None]:
    """Within the block the optimizer has these param groups and this state."""
    before = optimizer.param_groups, optimizer.state
    fresh: defaultdict[Any, Any] = defaultdict(dict)
    fresh.update(state)
    optimizer.param_groups, optimizer.state = groups, fresh
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = before


def rehearse(
    optimizer: torch.optim.Optimizer, group: ParamGroup, dtype: torch.dtype
) -> dict[str, torch.dtype]:
    """Dtypes, by name, of the states that have an entry for each element of a parameter of `dtype`
    in `group`.

    Raises:
        TypeError: For an optimizer that does not step each element by itself, or needs more than
            gradients.
    """
    who = type(optimizer).__name__
    generator = torch.Generator(device="cpu").manual_seed(0)
    start = torch.rand(NUMEL, generator=generator, device="cpu").add_(0.5).to(dtype)
    gradients = [torch.randn(NUMEL, generator=generator, device="cpu").to(dtype) for _ in range(2)]
    try:
        whole, states = _steps(optimizer, group, [start], [[g] for g in gradients])
        halves, _ = _steps(
            optimizer,
            group,
            list(start.split([32, 64])),
            [list(g.split([32, 64])) for g in gradients],
        )
    except Exception as error:
        raise TypeError(
            f"{who} can't be offloaded: a step of a flat parameter by its gradient alone "
            f"ended with {error!r}"
        ) from error
    if not torch.equal(whole[0], torch.cat(halves)):
        raise TypeError(
            f"{who} can't be offloaded tile by tile: its step of an element depends on "
            "others of the same parameter; use an "
            "optimizer that steps each element by itself, such as AdamW, Lion or SGD, or "
            "offload=None"
        )
    return {
        name: value.dtype
        for name, value in states[0].items()
        if isinstance(value, Tensor) and value.shape == (NUMEL,)
    }


def _steps(
    optimizer: torch.optim.Optimizer,
    group: ParamGroup,
    parts: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """The parts after steps with the gradients, and their states."""
    parameters = [nn.Parameter(part.clone()) for part in parts]
    options = {key: value for key, value in group.items() if key not in STATES_OF_ITS_OWN}
    options |= {"lr": 0.1, "params": parameters}
    if getattr(optimizer, "stochastic_rounding", False):
        options["offsets"] = [0, *(part.numel() for part in parts[:-1])]
    with standing_in(optimizer, [options], {}):
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
        states = [dict(optimizer.state[parameter]) for parameter in parameters]
    return [parameter.detach() for parameter in parameters], states
