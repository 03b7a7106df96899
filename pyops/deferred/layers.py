"""Linear layers whose weight and bias may carry a queue: a function, and torch.nn.Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.deferred.gradients import is_marked, weight_gradient

__all__ = ["linear", "linears", "remove"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's linear, x W^T + b, whose weight and bias may carry a queue; the weight an fp32
    `main_grad`, too.

    x [..., in], weight [out, in], bias [out]. Under autocast in its dtype. A compiled region puts
    nothing off.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out], or None.
    """
    if not is_marked(weight) or torch.compiler.is_compiling():
        return functional.linear(x, weight, bias)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if autocast else None
    y: Tensor = _Linear.apply(x, weight, bias, dtype)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None
    ) -> Tensor:
        ctx.parameters, ctx.dtype = (
            (weight, bias),
            dtype,
        )  # those that carry the marks; what is unpacked may be aliases
        x = x if dtype is None else x.to(dtype)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        w, b = (t if t is None or dtype is None else t.to(dtype) for t in (weight, bias))
        with torch.autocast(x.device.type, enabled=False):
            return functional.linear(x, w, b)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x, saved = ctx.saved_tensors
        weight, bias = ctx.parameters
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        dx = dy @ (saved if ctx.dtype is None else saved.to(ctx.dtype)) if need_x else None
        rows = dy.reshape(-1, dy.shape[-1])
        dw = weight_gradient(weight, rows, x.reshape(-1, x.shape[-1])) if need_w else None
        return dx, dw, weight_gradient(bias, rows, None) if need_b else None, None


class _Forward:
    """Stands in for the forward of a torch.nn.Linear."""

    def __init__(self, module: nn.Linear) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        return linear(input, self.module.weight, self.module.bias)


def linears(module: nn.Module) -> list[str]:
    """Let every torch.nn.Linear in `module` ask `weight_gradient`; returns their names.

    Their `forward` is replaced on the instance: names, parameters, state_dict and hooks stay.
    Subclasses, and layers whose forward somebody else has replaced, are left as they are.
    """
    names = []
    for name, layer in module.named_modules():
        if type(layer) is nn.Linear and "forward" not in layer.__dict__:
            layer.forward = _Forward(layer)  # type: ignore[method-assign]
            names.append(name)
    return names


def remove(module: nn.Module) -> list[str]:
    """Undo `linears`; returns the layers' names."""
    found = [
        (name, layer)
        for name, layer in module.named_modules()
        if isinstance(layer.__dict__.get("forward"), _Forward)
    ]
    for _, layer in found:
        del layer.forward
    return [name for name, _ in found]
