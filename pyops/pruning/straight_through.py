"""Training with N:M weights from the start: the layers compute with m w, where the mask m is made
of the dense w in every forward, and backward gives every weight a gradient.

    forward     y = x (m w)^T
    backward    dw = d(m w) + decay (1 - m) w                    SR-STE (Zhou et al., 2021)
    decoupled   dw = d(m w);  w <- w - lr decay (1 - m) w        before each step, as AdamW decays

The second term draws what is not alive towards 0, so that the masks come to rest. An optimizer that
divides by the root of the variance, as Adam does, divides it along with the gradient; decoupled, it
is not.

The parameters stay what they are, dense, by their names: for optimizers, for checkpoints and for
ZeRO. Only a layer that asks for its weight gets m w.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pyops.given_numbers import check_number
from pyops.pruning.masks import Masks, masks_of
from pyops.pruning.nm import NM, check_kind, check_pattern, nm_masks
from pyops.pruning.ranking.choice import prunable

__all__ = ["SparseTraining", "sparse_training", "sparse_weight"]

RULES = "_sparse_rules"  # of a module: {name of a parameter: (pattern, decay)}


class _StraightThrough(torch.autograd.Function):
    """m w, with the derivative of w and the pull of what is not alive towards 0."""

    @staticmethod
    def forward(ctx, weight: Tensor, pattern: NM, decay: float) -> Tensor:  # type: ignore[no-untyped-def, override]
        masked = pattern.masked(weight)
        ctx.decay = decay
        if decay:
            ctx.save_for_backward(weight, masked)
        return masked

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def, override]
        if not ctx.decay:
            return grad, None, None
        weight, masked = ctx.saved_tensors
        # (1 - m) w: exact, as each element of m w is w or 0
        return torch.add(grad, weight - masked, alpha=ctx.decay), None, None


def sparse_weight(weight: Tensor, pattern: NM, *, decay: float = 0.0) -> Tensor:
    """m w, where the mask m is that of w as it is now, with the derivative of SR-STE (Zhou et al.,
    "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", 2021, section 3):

        dw = d(m w) + decay (1 - m) w

    Args:
        weight: As of `NM.masked`.
        pattern: Of the mask.
        decay: How strongly what is not alive is pulled towards 0; 0 is the straight-through
            estimator.
    """
    found: Tensor = _StraightThrough.apply(weight, pattern, decay)  # type: ignore[no-untyped-call]
    return found


class SparseTraining:
    """A model that computes with N:M weights; as a context it ends with the block. See
    `sparse_training`.

    Attributes:
        model: The model.
        pattern: Of the masks.
        names: Of the parameters that are masked.
    """

    def __init__(self, model: nn.Module, pattern: NM, names: Sequence[str], decay: float) -> None:
        self.model, self.pattern, self.names = model, pattern, list(names)
        self._hook: RemovableHandle | None = None
        for name in names:
            owner, _, key = name.rpartition(".")
            _mask_within(model.get_submodule(owner), key, pattern, decay)

    def __enter__(self) -> SparseTraining:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def decay_before_steps(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        """Let what is not alive decay before each step of an optimizer, by its lr.

        Args:
            optimizer: Of the parameters, of torch's interface.
            decay: Of a weight, times lr, at each step.
        """
        named = dict(self.model.named_parameters())
        chosen = {id(named[name]): named[name] for name in self.names}

        @torch.no_grad()
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in chosen and parameter.grad is not None:
                        lost = parameter - self.pattern.masked(parameter)
                        parameter.sub_(lost, alpha=float(group["lr"]) * decay)

        self._hook = optimizer.register_step_pre_hook(before_step)

    def remove(self) -> None:
        """Let the layers compute with their dense weights again."""
        for module in self.model.modules():
            if module.__dict__.pop(RULES, None) is not None:
                module.__class__ = type(module).__mro__[1]
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def finish(self) -> Masks:
        """End it: the weights become m w.

        Returns:
            The masks, for `pyops.pruning.save`.
        """
        self.remove()
        return nm_masks(self.model, self.pattern, only=self.names)


def sparse_training(
    model: nn.Module,
    *,
    pattern: NM | None = None,
    decay: float | None = None,
    decoupled: bool | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    only: Sequence[str] | None = None,
) -> SparseTraining:
    """Let a model compute with N:M weights while it is trained.

    Args:
        model: Of pyops.models or anybody's; under tensor parallelism on all ranks alike.
        pattern: None: NM(2, 4).
        decay: What is not alive is drawn towards 0 by it; 0 is the straight-through estimator.
            None: 1 where it is decoupled, else the paper's 2e-4.
        decoupled: Do it before each step, as AdamW decays, and not by the gradient. None: where an
            optimizer is given.
        optimizer: Of the parameters.
        only: Patterns of names of parameters or layers, ["blocks.*"]; None: matrices and
            convolutions, but for embeddings and the last layer.

    Returns:
        A context, whose `finish()` gives the masks.

    Raises:
        ValueError: Before anything is changed: for sizes that are no whole groups (under tensor
            parallelism, of a rank's part), frozen parameters, a model that is pruned or trained so
            already, a decay below 0; for an optimizer that does not hold the parameters themselves,
            such as one of ZeRO, or holds them in another precision, with `decoupled`.
    """
    pattern = NM() if pattern is None else pattern
    check_kind(pattern)
    decoupled = optimizer is not None if decoupled is None else decoupled
    decay = (1.0 if decoupled else 2e-4) if decay is None else decay
    chosen = prunable(model, only)
    check_number("decay", decay, lambda v: 0 <= v < math.inf, "give 0 or more")
    if any(RULES in module.__dict__ for module in model.modules()):
        raise ValueError("the model is trained with N:M weights already; call remove() of that")
    if masked := [name for name in masks_of(model) if name in chosen]:
        raise ValueError(f"{masked[0]} has a mask already; call release() of its masks first")
    check_pattern(model, pattern, list(chosen))
    stepped_by = _checked_optimizer(optimizer, chosen) if decoupled else None
    found = SparseTraining(model, pattern, list(chosen), 0.0 if decoupled else decay)
    if stepped_by is not None and decay:
        found.decay_before_steps(stepped_by, decay)
    return found


def _checked_optimizer(
    optimizer: torch.optim.Optimizer | None, chosen: dict[str, nn.Parameter]
) -> torch.optim.Optimizer:
    if optimizer is None or not hasattr(optimizer, "register_step_pre_hook"):
        raise ValueError(
            f"decoupled=True needs the optimizer of the parameters, of torch's interface; got "
            f"{type(optimizer).__name__}: give optimizer=, or decoupled=False"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in chosen.items():
        if id(parameter) not in held or parameter.dtype.itemsize < 4:
            raise ValueError(
                f"{name} ({parameter.dtype}) is not held by the optimizer as it is: ZeRO shares it "
                "out, or a copy in fp32 is stepped in its place; use decoupled=False"
            )
    return optimizer


def _mask_within(module: nn.Module, key: str, pattern: NM, decay: float) -> None:
    """Let `module.<key>` be m w from now on; its parameters stay."""
    rules = module.__dict__.get(RULES)
    if rules is None:
        kind = type(module)
        body = {"get_parameter": _get_parameter, "__module__": kind.__module__}
        module.__class__ = type(kind.__name__, (kind,), body)
        rules = module.__dict__[RULES] = {}
    rules[key] = (pattern, decay)
    setattr(type(module), key, property(lambda self: _masked(self, key)))


def _masked(module: nn.Module, key: str) -> Tensor:
    weight = module._parameters[key]
    assert weight is not None
    pattern, decay = module.__dict__[RULES][key]
    if not weight.numel():  # ZeRO stage 3 has it elsewhere
        return weight
    return sparse_weight(weight, pattern, decay=decay)


def _get_parameter(module: nn.Module, target: str) -> nn.Parameter:
    """The parameter itself, not what the layer computes with."""
    found = module._parameters.get(target)
    return nn.Module.get_parameter(module, target) if found is None else found
