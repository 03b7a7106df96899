"""Forward and backward of a layer as one call, and the check that it is no further from float64
than twice torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Layer", "compare", "forward_backward", "largest", "resembles"]

Layer = Callable[..., Tensor | tuple[Tensor, ...]]
Call = Callable[[], list[Tensor]]


def forward_backward(layer: Layer, leaves: Sequence[Tensor], seeds: Sequence[Tensor]) -> Call:
    """A call that gives the outputs and the leaves' gradients, each newly made; seeds: the outputs'
    gradients."""

    def call() -> list[Tensor]:
        found = layer(*leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found)
        return [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]

    return call


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return float(x.detach().abs().max())


def compare(
    ours: Call, layer: Layer, leaves: Sequence[Tensor], seeds: Sequence[Tensor]
) -> Callable[[], float]:
    """A check that no result is further from `layer` in float64 than twice `layer` itself, in the
    largest element.

    The check returns our largest error.
    """

    def check() -> float:
        twins = [t.detach().double().requires_grad_() for t in leaves]
        exact = forward_backward(layer, twins, [seed.double() for seed in seeds])()
        worst = 0.0
        for a, b, e in zip(ours(), forward_backward(layer, leaves, seeds)(), exact, strict=True):
            error, allowed = largest(a.double() - e), 2 * largest(b.double() - e)
            if error > allowed + torch.finfo(a.dtype).eps * largest(e) or not largest(e) > 0:
                raise AssertionError(f"error {error}, torch's times two {allowed}")
            worst = max(worst, error)
        return worst

    return check


def resembles(rival: Call, ours: Call, *, results: int = 1) -> Callable[[], None]:
    """A check that the first results of a rival are ours, to a twentieth: that it was asked for the
    same thing.

    Its gradients are left alone: some rivals write them over their inputs.
    """

    def check() -> None:
        for a, b in list(zip(rival(), ours(), strict=False))[:results]:
            error, bound = largest(a.reshape(b.shape).float() - b.float()), largest(b) / 20
            if not error <= bound:
                raise AssertionError(f"its result is off by {error}, where {bound} would do")

    return check
