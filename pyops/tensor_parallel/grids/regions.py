"""Autograd edges along a line of a grid: each one's backward is another's forward.

                 forward                       backward
gathered         the ranks' parts together     own part of the sum of dy
scattered_sum    own part of the ranks' sum    the ranks' dy together
shared           x, the same on the ranks      the sum of dy
summed           the ranks' sum                dy
exchanged        the tensor of another rank    the dy of that rank
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.tensor_parallel.grids.line import Line

__all__ = ["exchanged", "gathered", "scattered_sum", "shared", "summed"]

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
