"""LAMB and LARS written out once more, plainly, in any dtype: what the tests of both judge by."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pyops.flat import FlatBuffer

__all__ = ["SHAPES", "flat_twin", "gradients", "lamb", "lars", "layers", "options_of", "padding_of"]

# Around a register, a tile of 1024 and a block of 16384; one element, none; a layer of zeros comes
# last.
SHAPES: tuple[tuple[int, ...], ...] = ((5, 7), (1,), (0,), (130,), (61, 300), (), (1024,), (33,))
LAMB = {"lr": 0.013, "betas": (0.77, 0.952), "eps": 3e-5, "weight_decay": 0.21}
LARS = {"lr": 0.9, "momentum": 0.8, "weight_decay": 0.21, "trust_coefficient": 0.3, "eps": 1e-4}


def layers(
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    found = [
        nn.Parameter((torch.randn(s, generator=generator) * (1 + i)).to(device, dtype))
        for i, s in enumerate(shapes)
    ]
    found[-1].data.zero_()
    return found


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [
        (torch.randn(p.shape, generator=generator) * (0.1 + step)).to(p.device, p.dtype)
        for p in params
    ]


def flat_twin(params: Sequence[Tensor]) -> FlatBuffer:
    """The same parameters in one buffer, whose padding holds sevens."""
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    buffer = FlatBuffer([(f"layer {i}", p) for i, p in enumerate(twins)], multiple_of=1000)
    buffer.data[padding_of(buffer)] = 7.0
    return buffer


def padding_of(buffer: FlatBuffer) -> Tensor:
    """Which elements of the buffer belong to no layer."""
    padding = torch.ones(buffer.layout.numel, dtype=torch.bool, device=buffer.data.device)
    for i in range(len(buffer)):
        padding[buffer.layout.slice_at(i)] = False
    return padding


def _ratio(p: Tensor, u: Tensor, least: float, most: float) -> float:
    a, b = float(p.norm()), float(u.norm())
    return 1.0 if a == 0 or b == 0 else min(max(a / b, least), most)


def lamb(
    p: Tensor,
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    min_ratio: float = 0.0,
    max_ratio: float = math.inf,
    trust_ratio: bool = True,
    maximize: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """p, m and v after a step for each gradient."""
    p = p.detach().to(dtype)
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step, gradient in enumerate(grads, 1):
        g = gradient.to(dtype) * (-factor if maximize else factor)
        m = m * betas[0] + g * (1 - betas[0])
        v = v * betas[1] + g * g * (1 - betas[1])
        u = (
            m / (1 - betas[0] ** step) / ((v / (1 - betas[1] ** step)).sqrt() + eps)
            + weight_decay * p
        )
        p = p - lr * (_ratio(p, u, min_ratio, max_ratio) if trust_ratio else 1.0) * u
    return p, m, v


def lars(
    p: Tensor,
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    trust_coefficient: float,
    eps: float,
    dampening: float = 0.0,
    nesterov: bool = False,
    trust_ratio: bool = True,
    maximize: bool = False,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """p and the momentum after a step for each gradient."""
    p = p.detach().to(dtype)
    b = torch.zeros_like(p)
    for step, gradient in enumerate(grads):
        g = gradient.to(dtype) * (-factor if maximize else factor)
        w_norm, g_norm = float(p.norm()), float(g.norm())
        local = 1.0
        if trust_ratio and w_norm and g_norm:
            local = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
        g = local * (g + weight_decay * p)
        b = g if step == 0 else momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b if nesterov else b)
    return p, b


def options_of(kind: str, **changes: Any) -> dict[str, Any]:
    return {**(LAMB if kind == "LAMB" else LARS), **changes}
