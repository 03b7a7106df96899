"""Autograd edges along a line of a grid, or over all of it: each one's backward is another's
forward.

                 forward                       backward
gathered         the ranks' parts together     own part of the sum of dy
scattered_sum    own part of the ranks' sum    the ranks' dy together
shared           x, the same on the ranks      the sum of dy
summed           the ranks' sum                dy
exchanged        the tensor of another rank    the dy of that rank
own_block        own block of a whole tensor   the whole of the blocks of dy
whole            the whole of the blocks       own block of dy, the same on every rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.tensor_parallel.grids.grid import Cuts, Grid
from pyops.tensor_parallel.grids.line import Line

__all__ = [
    "exchanged",
    "gathered",
    "own_block",
    "scattered_sum",
    "shared",
    "summed",
    "whole",
]

_BACKWARD = {
    "gathered": "scattered_sum",
    "scattered_sum": "gathered",
    "shared": "summed",
    "summed": "shared",
    "exchanged": "exchanged",
}


def gathered(x: Tensor, line: Line, *, dim: int) -> Tensor:
    """The ranks' x one after the other along `dim`, with which each goes on in its own way."""
    return _apply(x, "gathered", line, dim)


def scattered_sum(x: Tensor, line: Line, *, dim: int) -> Tensor:
    """This rank's of equal parts along `dim` of the sum of the ranks' x."""
    return _apply(x, "scattered_sum", line, dim)


def shared(x: Tensor, line: Line) -> Tensor:
    """x, of which every rank has the same and makes its own use: gradients are summed."""
    return _apply(x, "shared", line, 0)


def summed(x: Tensor, line: Line) -> Tensor:
    """The sum of the ranks' x, with which every rank does the same."""
    return _apply(x, "summed", line, 0)


def exchanged(x: Tensor, line: Line, peer: int) -> Tensor:
    """The x of a rank of the line, which takes this rank's for it."""
    return _apply(x, "exchanged", line, peer)


def own_block(x: Tensor, grid: Grid, cuts: Cuts | None = None) -> Tensor:
    """This rank's block of x [B, ..., width], the same on every rank, as is its gradient."""
    if grid.size == 1:
        return x
    found: Tensor = _OwnBlock.apply(x, grid, cuts)  # type: ignore[no-untyped-call]
    return found


def whole(x: Tensor, grid: Grid, *, batch: int, width: int, cuts: Cuts | None = None) -> Tensor:
    """[batch, ..., width] of the ranks' blocks, with which every rank does the same."""
    if grid.size == 1:
        return x
    found: Tensor = _Whole.apply(x, grid, batch, width, cuts)  # type: ignore[no-untyped-call]
    return found


def _apply(x: Tensor, operator: str, line: Line, number: int) -> Tensor:
    if line.size == 1:
        return x
    found: Tensor = _Region.apply(x, operator, line, number)  # type: ignore[no-untyped-call]
    return found


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: str, line: Line, number: int) -> Tensor:
        ctx.operator, ctx.line, ctx.number = operator, line, number
        if operator == "gathered":
            return line.gather(x, dim=number)
        if operator == "scattered_sum":
            return line.reduce_scatter(x, dim=number)
        if operator == "exchanged":
            found = line.exchange(x, number)
            return found.view_as(found) if found is x else found
        return x.view_as(x) if operator == "shared" else line.sum(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = _Region.apply(dy, _BACKWARD[ctx.operator], ctx.line, ctx.number)  # type: ignore[no-untyped-call]
        return dx, None, None, None


class _OwnBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, cuts: Cuts | None) -> Tensor:
        ctx.where = grid, len(x), x.shape[-1], cuts
        return grid.take(x, cuts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _Whole.apply(dy, *ctx.where), None, None  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: Grid, batch: int, width: int, cuts: Cuts | None
    ) -> Tensor:
        ctx.where = grid, cuts
        return grid.whole(x, batch=batch, width=width, cuts=cuts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _OwnBlock.apply(dy, *ctx.where), None, None, None, None  # type: ignore[no-untyped-call]
