"""Options of the optimizers that are given by keyword: torch.optim's switches and what pyops adds.

    AdamW(parameters, lr=3e-4, master_weights=True, max_grad_norm=1.0)
          `--- torch's arguments, by position or keyword ---'  `- options of AdamWOptions -'

Each optimizer names the TypedDict that it takes as `**options: Unpack[...]`; OPTION_DEFAULTS has
the value of what is left out.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from typing_extensions import TypedDict

__all__ = [
    "AdafactorOptions",
    "AdagradOptions",
    "AdamOptions",
    "AdamWOptions",
    "LayerwiseOptions",
    "SGDOptions",
    "chosen_options",
    "shows_options",
]


class StepOptions(TypedDict, total=False):
    """Options of every optimizer of pyops.optim."""

    maximize: bool
    """Step along the gradient instead of against it. Default: False."""
    master_weights: bool
    """Keep a float32 master of each 16-bit parameter in state["master"]; the parameter is the
    master's rounding. Default: False."""
    stochastic_rounding: bool
    """Round 16-bit states, and 16-bit parameters without a master, up or down at random and
    unbiased. The random bits are keyed by `seed`, the parameter's step and the element's number,
    so that a resumed or a sharded run draws the same ones. Default: False."""
    max_grad_norm: float | None
    """Clip the gradients of all groups together to this 2-norm inside the step. The norm before
    clipping is then `optimizer.grad_norm`; gradients with an inf or a nan skip the step. `.grad`
    itself is not changed. Default: None, no clipping."""
    zero_grad: bool
    """Zero the gradients in the same pass, also where the step is skipped. They stay allocated.
    Default: False."""
    seed: int
    """Seed of stochastic_rounding, saved in `param_groups`. Default: 0."""


class AdagradOptions(StepOptions, total=False):
    """Options of Adagrad, whose `foreach` torch takes by position."""

    state_dtype: torch.dtype
    """Dtype of the states: torch.float32, bfloat16 or float16. Default: torch.float32."""
    differentiable: bool
    """torch.optim's; True raises ValueError, because no kernel has a derivative. Default: False."""
    fused: bool | None
    """torch.optim's, without effect: the step is always fused. Default: None."""


class SGDOptions(AdagradOptions, total=False):
    """Options of SGD."""

    foreach: bool | None
    """torch.optim's, without effect: the step is always fused. Default: None."""


class AdamWOptions(SGDOptions, total=False):
    """Options of AdamW and Lion."""

    capturable: bool
    """Allow the step to be captured in a CUDA graph. Default: False."""


class AdamOptions(AdamWOptions, total=False):
    """Options of Adam."""

    decoupled_weight_decay: bool
    """Decay the weights apart from the gradient, as AdamW does. Default: False."""


class LayerwiseOptions(AdamWOptions, total=False):
    """Options of LAMB and LARS."""

    trust_ratio: bool
    """Scale each layer's step by the norms of the layer. False in a group (biases, norms) leaves
    the plain rule: AdamW's or SGD's. Default: True."""


class AdafactorOptions(StepOptions, total=False):
    """Options of Adafactor, whose states are always float32."""

    foreach: bool | None
    """torch.optim's, without effect: the step is always fused. Default: None."""
    capturable: bool
    """Allow the step to be captured in a CUDA graph. Default: False."""


class _AllOptions(AdamOptions, LayerwiseOptions):
    """Every option, each of which has one default whatever the optimizer."""


OPTION_DEFAULTS: _AllOptions = {
    "maximize": False,
    "foreach": None,
    "fused": None,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": False,
    "trust_ratio": True,
    "master_weights": False,
    "state_dtype": torch.float32,
    "stochastic_rounding": False,
    "max_grad_norm": None,
    "zero_grad": False,
    "seed": 0,
}


def _names(kind: type) -> list[str]:
    """Names of a TypedDict's options, in the order of OPTION_DEFAULTS."""
    return [name for name in OPTION_DEFAULTS if name in kind.__annotations__]


def chosen_options(optimizer: object, kind: type, given: Mapping[str, object]) -> dict[str, Any]:
    """All options of an optimizer: those that the caller gave, and the defaults of the others.

    Args:
        optimizer: whose constructor it is, named in the error.
        kind: the TypedDict of its options.
        given: the keyword arguments.

    Raises:
        TypeError: for a name that is not an option; it says which is nearest.
    """
    names = _names(kind)
    for name in given:
        if name not in names:
            who = type(optimizer).__name__
            known = [*inspect.signature(type(optimizer)).parameters, *names]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"its options are {sorted(known)}"
            raise TypeError(f"{who} has no option {name!r}; {hint}")
    defaults = cast("dict[str, Any]", OPTION_DEFAULTS)
    return {name: given.get(name, defaults[name]) for name in names}


_Init = TypeVar("_Init", bound=Callable[..., None])


def shows_options(kind: type) -> Callable[[_Init], _Init]:
    """Decorator of a constructor with `**options: Unpack[kind]`: its signature lists the options
    with their defaults, for help() and inspect, as it would without the dictionary."""

    def show(init: _Init) -> _Init:
        signature = inspect.signature(init)
        written = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=OPTION_DEFAULTS[name],  # type: ignore[literal-required]
                annotation=kind.__annotations__[name],
            )
            for name in _names(kind)
        ]
        shown = signature.replace(parameters=[*written, *options])
        init.__signature__ = shown  # type: ignore[attr-defined]
        return init

    return show
