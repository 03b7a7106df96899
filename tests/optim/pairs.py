"""Pairs of optimizers on equal parameters and gradients: ours, torch's in the same dtype, torch's
in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.tolerance import assert_close_to_reference

# Pairwise different and none a default: an argument that is dropped or swapped shows.
HYPER: dict[str, Any] = {"lr": 0.013, "betas": (0.77, 0.952), "eps": 3e-5, "weight_decay": 0.21}
SHAPES = ((5, 7), (1,), (0,), (3, 2, 4), (130,), ())


def parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(device=device, dtype=dtype))
        for shape in shapes
    ]


def twins(params: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[nn.Parameter]:
    """Parameters of the same values with memory of their own, laid out alike."""
    return [nn.Parameter(p.detach().clone().to(dtype or p.dtype)) for p in params]


def give_gradients(*lists: Sequence[Tensor], seed: int) -> None:
    """The same random gradients to every list, each in its parameter's dtype; no two steps
    alike."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for row in zip(*lists, strict=True):
        grad = torch.randn(row[0].shape, generator=generator) * (1 + seed % 3)
        grad = grad.to(row[0].dtype)  # what the lowest precision sees, all see
        for param in row:
            param.grad = grad.to(device=param.device, dtype=param.dtype, copy=True)


def run(
    optimizers: Sequence[torch.optim.Optimizer],
    lists: Sequence[Sequence[Tensor]],
    *,
    steps: int,
    first: int = 0,
    between: Callable[[int], None] | None = None,
) -> None:
    for step in range(first, first + steps):
        give_gradients(*lists, seed=step)
        if between is not None:
            between(step)
        for optimizer in optimizers:
            optimizer.step()


def assert_as_torch(
    ours: Sequence[Tensor], plain: Sequence[Tensor], reference: Sequence[Tensor], *, steps: int
) -> None:
    """Element by element, no worse than twice plain torch, with one rounding per step where that
    happens to be exact."""
    for a, b, c in zip(ours, plain, reference, strict=True):
        largest = float(c.detach().abs().max()) if c.numel() else 0.0
        tiny = steps * torch.finfo(a.dtype).eps * largest
        assert_close_to_reference(a.detach(), b.detach(), c.detach(), tiny=tiny)


def assert_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a.detach(), b.detach()), (
            f"tensor {i} differs by {(a.detach() - b.detach()).abs().max()}"
        )


def assert_moved(before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """A guard: a step that does nothing fails here."""
    for a, b in zip(before, after, strict=True):
        assert a.numel() == 0 or not torch.equal(a, b.detach().to(a.dtype)), (
            "a parameter was not stepped"
        )
