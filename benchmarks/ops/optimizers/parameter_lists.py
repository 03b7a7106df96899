"""Lists of parameters with gradients, their twins for a rival, and what the two are compared by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["Step", "compare", "difference", "parameters", "twins"]

Step = Callable[[], object]


def parameters(
    sizes: list[int], *, device: torch.device, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    generator = torch.Generator(device=device).manual_seed(1)
    found = []
    for numel in sizes:
        param = nn.Parameter(torch.randn(numel, generator=generator, device=device).to(dtype))
        param.grad = torch.randn(numel, generator=generator, device=device).to(dtype)
        found.append(param)
    return found


def twins(params: list[nn.Parameter], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    found = []
    for p in params:
        assert p.grad is not None
        twin = nn.Parameter(p.detach().to(dtype or p.dtype, copy=True))
        twin.grad = p.grad.to(twin.dtype, copy=True)
        found.append(twin)
    return found


def difference(
    ours: list[nn.Parameter], theirs: list[nn.Parameter], *, relative: float = 1e-5
) -> float:
    """The largest difference; raises when it is more than rounding."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        found = float((a.detach().float() - b.detach().float()).abs().max())
        worst = max(worst, found)
        if found > relative * float(b.detach().float().abs().max()):
            raise AssertionError(f"differs from torch by {found}")
    return worst


def compare(
    ours: list[nn.Parameter], theirs: list[nn.Parameter], *steps: Step, relative: float = 1e-5
) -> float:
    """Take each step three times and return the largest difference; raises when nothing moved,
    too."""
    before = ours[0].detach().clone()
    for _ in range(3):
        for step in steps:
            step()
    if torch.equal(before, ours[0].detach()):
        raise AssertionError("the step moved nothing")
    return difference(ours, theirs, relative=relative)
