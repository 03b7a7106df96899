"""Grids whose ranks are threads of this process, and what their blocks make together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from pyops.comm.collectives.transport import run_virtual
from pyops.tensor_parallel.grids.grid import Cuts, Grid

T = TypeVar("T")
Shape = tuple[int, ...]

SMALL: list[tuple[str, Shape]] = [
    ("2d", (1, 1)),
    ("2d", (1, 2)),
    ("2d", (2, 1)),
    ("2d", (2, 2)),
    ("2.5d", (2, 1, 1)),
    ("2.5d", (1, 2, 2)),
    ("2.5d", (2, 2, 2)),
    ("3d", (1, 1, 1)),
    ("3d", (2, 2, 2)),
]
LARGE: list[tuple[str, Shape]] = [
    ("2d", (2, 4)),
    ("2d", (3, 3)),
    ("2d", (4, 4)),
    ("2.5d", (2, 3, 3)),
    ("2.5d", (4, 2, 2)),
    ("2.5d", (4, 4, 4)),
    ("3d", (3, 3, 3)),
    ("3d", (4, 4, 4)),
]
STEPPED = [
    (mode, shape) for mode, shape in SMALL + LARGE if mode != "3d" and shape[-1] == shape[-2]
]


def on_grid(mode: str, shape: Sequence[int], body: Callable[[Grid], T]) -> list[T]:
    """body(grid) on every rank; the results in rank order."""
    return run_virtual(
        math.prod(shape), lambda transport: body(Grid(transport, mode=mode, shape=shape))
    )


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """float64 [shape], of which no two rows or columns are alike."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return found * (
        1 + torch.arange(shape[0], dtype=torch.float64).view(-1, *[1] * (len(shape) - 1)) / 10
    )


def assert_equal(
    got: Tensor,
    expected: Tensor,
    what: str,
    tolerance: float = 1e-12,
    *,
    whole: Tensor | None = None,
) -> None:
    """Relative to the largest element, of `whole` where it is given; an expected tensor of zeros
    alone can't be failed by a gradient that is missing, so there must be another."""
    assert got.shape == expected.shape, (what, got.shape, expected.shape)
    error = (got - expected).abs().max().item() if got.numel() else 0.0
    scale = (expected if whole is None else whole).abs().max().item() if got.numel() else 0.0
    assert error <= tolerance * max(scale, 1.0), (what, error, scale)


def block(grid: Grid, whole: Tensor, cuts: Cuts | None = None) -> Tensor:
    """This rank's block, with a gradient."""
    return grid.take(whole, cuts).detach().requires_grad_()
