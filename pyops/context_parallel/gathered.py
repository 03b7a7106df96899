"""Attention to keys and values that are gathered from the ranks, in their order within the row.

    rank 0   q0   k0 v0 --.            .--  q0 to k v of all
                          +-- gather --+
    rank 1   q1   k1 v1 --'            '--  q1 to k v of all

Every rank visits the keys in the order of one rank, so y and the gradient of q have the bits of one
rank. For backward k and v are gathered again: only the own ones are kept. Received by a rank,
forward: 2 S h (N - 1) / N numbers, h = G K; backward: twice that, half of it gradients on their way
to their owners (Llama 3, arXiv:2407.21783, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.context_parallel.peers import Peers
from pyops.context_parallel.problem import Problem
from pyops.ops.attention import attention_gradients, attention_with_lse

__all__ = ["Outer", "gathered_attention"]


@dataclass(frozen=True)
class Outer:
    """Ranks among which tokens are shared out, each with all heads at hand."""

    peers: Peers
    """The ranks."""
    queries: Tensor
    """int64 [n]: the places of this rank's queries, on the device."""
    keys: tuple[Tensor, ...]
    """int64 [m]: the places of the keys that each rank holds."""
    every_key: Tensor
    """int64 [S]: 0, 1, 2, ..., the places of the whole row of keys."""
    problem: Problem
    """Of the heads at hand, and of this rank's queries; scores and table apart."""


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, outer: Outer) -> Tensor:
    """Attention of this rank's queries to the keys of all. Collective.

    Args:
        q: [B, n, H, K], at `outer.queries`.
        k: [B, m, G, K].
        v: [B, m, G, K].
        outer: The ranks, and what is asked of the row.

    Returns:
        [B, n, H, K].
    """
    bias = outer.problem.bias
    y: Tensor = _Gathered.apply(q, k, v, bias.scores, bias.table, outer)  # type: ignore[no-untyped-call]
    return y


def _of_all(k: Tensor, v: Tensor, outer: Outer) -> tuple[Tensor, Tensor]:
    """k and v of the whole row, in its order."""
    parts = outer.peers.gather(torch.stack([k, v]))
    B, n, G, K = k.shape
    both = k.new_empty(2, B, n * len(parts), G, K)
    for places, part in zip(outer.keys, parts, strict=True):
        both.index_copy_(2, places, part)
    return both[0], both[1]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Tensor | None,
        table: Tensor | None,
        outer: Outer,
    ) -> Tensor:
        problem = outer.problem.with_tensors(scores, table)
        call = problem.call(outer.queries, outer.every_key, whole=True)
        y, lse = attention_with_lse(q, *_of_all(k, v, outer), **call)
        ctx.outer = outer
        ctx.save_for_backward(q, k, v, scores, table, y, lse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, scores, table, y, lse = ctx.saved_tensors
        outer: Outer = ctx.outer
        problem = outer.problem.with_tensors(scores, table)
        call = problem.call(outer.queries, outer.every_key, whole=True)
        found = attention_gradients(
            (dy, y, lse), (q, *_of_all(k, v, outer)), **call, wanted=ctx.needs_input_grad[3:5]
        )
        both = torch.stack([found.k, found.v])
        dk, dv = outer.peers.sum_scattered([both.index_select(2, places) for places in outer.keys])
        return found.q, dk, dv, found.scores, found.table, None
