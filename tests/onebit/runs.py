"""Bodies that workers run: an optimizer on given gradients, and what became of parameters, momenta
and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

import pyops.onebit

__all__ = ["Result", "built", "grads_of", "optimizer_of", "run_steps", "take_steps"]

CONFIGS: dict[Any, Any] = {
    pyops.onebit.OneBitAdam: pyops.onebit.OneBitConfig,
    pyops.onebit.OneBitLAMB: pyops.onebit.OneBitLAMBConfig,
    pyops.onebit.ZeroOneAdam: pyops.onebit.ZeroOneConfig,
}
Gradients = Sequence[Sequence[Sequence[Tensor]]]


@dataclass
class Result:
    """Of one rank: parameters after each step, phases, norms, and the state_dict at the end."""

    params: list[list[Tensor]] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def optimizer_of(
    kind: str, params: Sequence[Tensor], group: Any, options: dict[str, Any]
) -> tuple[Any, list[nn.Parameter]]:
    """An optimizer of copies of `params`, and the copies. options["decays"]: a weight decay, hence
    a group, per parameter."""
    options = dict(options)
    dtype = options.pop("dtype", torch.float32)
    decays = options.pop("decays", None)
    copies = [nn.Parameter(p.clone().to(dtype)) for p in params]
    groups: Any = copies
    if decays is not None:
        groups = [{"params": [p], "weight_decay": d} for p, d in zip(copies, decays, strict=True)]
    return built(getattr(pyops.onebit, kind), groups, group=group, **options), copies


def built(cls: Any, params: Any, **options: Any) -> Any:
    """An optimizer of pyops.onebit, of options in one dict: those of its config, and others."""
    config_class = CONFIGS[cls]
    names = {each.name for each in fields(config_class)}
    config = config_class(**{name: options.pop(name) for name in names & set(options)})
    return cls(params, config=config, **options)


def grads_of(params: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = None if g is None else g.clone().to(p.dtype)


def take_steps(
    optimizer: Any, params: list[nn.Parameter], gradients: Sequence[Sequence[Tensor]]
) -> Result:
    result = Result()
    for each in gradients:
        grads_of(params, each)
        optimizer.step()
        result.params.append([p.detach().clone() for p in params])
        result.phases.append(optimizer.phase)
        result.norms.append(float(optimizer.grad_norm))
    result.state = optimizer.state_dict()
    return result


def run_steps(
    rank: int,
    group: Any,
    kind: str,
    params: Sequence[Tensor],
    gradients: Gradients,
    options: dict[str, Any],
    saved: Any = None,
) -> Result:
    """Body: all steps of `gradients` [step][rank][parameter]; saved: the ranks' state_dicts and
    parameters to begin with."""
    optimizer, copies = optimizer_of(kind, params, group, options)
    if saved is not None:
        states, values = saved
        with torch.no_grad():
            for p, value in zip(copies, values, strict=True):
                p.copy_(value)
        optimizer.load_state_dict(states[rank % len(states)])
    return take_steps(optimizer, copies, [each[rank] for each in gradients])
