"""precision=: the dtype a model is cast to before it is shared out, and the loss scale where
gradients need one.

ZeroOptimizer(model, AdamW, ZeroConfig(stage=2, precision="fp16"))
                                                 model.to(float16), float32 masters, LossScale()
optimizer.scale(loss).backward()
optimizer.step()                                 an inf anywhere: no rank steps, the scale falls
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pyops.optim.fused.fused_optimizer import FusedOptimizer
from pyops.precision import PRECISIONS, LossScale, Precision

__all__ = ["PrecisionPlan", "make_precision_plan"]


class PrecisionPlan:
    """What `precision=` comes to. dtype: of the model's floating-point numbers, None for as they
    are.

    Args:
        arguments: Of the inner optimizer.
        loss_scale: None where gradients need none.
    """

    def __init__(
        self, precision: Precision | None, arguments: dict[str, Any], loss_scale: LossScale | None
    ) -> None:
        self.precision, self.arguments, self.loss_scale = precision, arguments, loss_scale
        self.dtype = None if precision is None else precision.dtype

    def cast(self, model: nn.Module) -> None:
        """The model's floating-point parameters and buffers, in place, as `model.to(dtype)`."""
        if self.dtype is not None:
            model.to(self.dtype)

    def scale_for(self, optimizer: Any) -> Any:
        """What this step's gradients were multiplied by: what somebody else's scaler says, else our
        own; None for 1."""
        if "grad_scale" in vars(optimizer) or self.loss_scale is None:
            return getattr(optimizer, "grad_scale", None)
        return torch.tensor(self.loss_scale.scale, device="cpu")

    def stepped(self, optimizer: Any, *, skipped: bool) -> None:
        """Set our own scale for the next step."""
        if self.loss_scale is not None and "grad_scale" not in vars(optimizer):
            self.loss_scale.update(skipped)

    def state_dict(self) -> dict[str, Any]:
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.loss_scale is not None and state.get("loss_scale"):
            self.loss_scale.load_state_dict(state["loss_scale"])

    def described(self) -> Any:
        """For comparing ranks."""
        return self.precision, None if self.loss_scale is None else sorted(
            vars(self.loss_scale).items()
        )


def make_precision_plan(
    precision: Any, loss_scale: Any, optimizer_class: Any, arguments: Mapping[str, Any]
) -> PrecisionPlan:
    """Of checked arguments of ZeroOptimizer; TypeError or ValueError for what makes no sense."""
    who = "ZeroOptimizer"
    given = dict(arguments)
    if precision is None:
        if loss_scale is not None:
            raise ValueError(
                f"{who}: loss_scale belongs to a precision that is scaled, such as "
                "precision='fp16'; give that too"
            )
        return PrecisionPlan(None, given, None)
    if not isinstance(precision, Precision | str):
        raise TypeError(
            f"{who}: precision is {precision!r}; give one of {sorted(PRECISIONS)}, a "
            "Precision, or None"
        )
    if isinstance(precision, str) and precision not in PRECISIONS:
        raise ValueError(
            f"{who}: precision is {precision!r}; choose one of {sorted(PRECISIONS)}, or "
            "give a Precision"
        )
    found = PRECISIONS[precision] if isinstance(precision, str) else precision
    if loss_scale is not None and not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"{who}: loss_scale is {loss_scale!r}; give a pyops.precision.LossScale, or "
            "None for one with defaults"
        )
    if loss_scale is not None and not found.scaled:
        raise ValueError(f"{who}: precision {found.name!r} has no loss scale; leave loss_scale out")
    fused = isinstance(optimizer_class, type) and issubclass(optimizer_class, FusedOptimizer)
    if fused and not given.get("stochastic_rounding", False):
        given.setdefault("master_weights", found.master_weights)
    elif not fused and not found.master_weights and found.dtype.itemsize < 4:
        raise ValueError(
            f"{who}: precision {found.name!r} has no master weights, and "
            f"{optimizer_class} always has them here, for "
            "parameters of 16 bits; use an optimizer of pyops.optim, or master_weights=True"
        )
    scale = (loss_scale if loss_scale is not None else LossScale()) if found.scaled else None
    return PrecisionPlan(found, given, scale)
