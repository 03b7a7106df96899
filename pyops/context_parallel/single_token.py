"""One token of a row, such as that which a class is read from: on every rank, and counted once.

    rank 0   x0 x1    x0 --> head --> logits    gradient: its own, of head and x0
    rank 1   x2 x3    x0 --> head --> logits    gradient: zero

All ranks compute the head alike, and none waits for another in backward. That gradients are
summands, here as everywhere, is the part of `OnceOfRanks`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.context_parallel.peers import Wire

__all__ = ["OnEveryRank", "OnceOfRanks"]


class OnEveryRank(torch.autograd.Function):
    """x [B, n, ...] of each rank -> [B, ...], token `at` of the rank `owner`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: tuple[int, int], wire: Wire) -> Tensor:
        owner, at = token
        ctx.shape, ctx.at = x.shape, at if wire.rank == owner else None
        found = x[:, at].contiguous()
        flat = found.view(-1)
        if wire.rank == owner:
            others = [rank for rank in range(wire.size) if rank != owner]
            wire.post([(flat, rank) for rank in others], []).wait()
        else:
            wire.post([], [(flat, owner)]).wait()
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx = dy.new_zeros(ctx.shape)
        if ctx.at is not None:
            dx[:, ctx.at] = dy
        return dx, None, None


class OnceOfRanks(torch.autograd.Function):
    """y -> y, with its gradient on one rank, and zero on the others."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: bool) -> Tensor:
        ctx.counts = counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy if ctx.counts else torch.zeros_like(dy), None
