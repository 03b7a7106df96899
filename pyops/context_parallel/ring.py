"""Attention to keys and values that travel around a ring, a rank's part at a time.

    step        0     1     2            each rank computes with the part at hand while the next
    rank 0     kv0   kv2   kv1           one is on its way, and merges what it finds by the
    rank 1     kv1   kv0   kv2           logarithm of the sums (Liu et al., arXiv:2310.01889)
    rank 2     kv2   kv1   kv0

Backward goes around once more, with y and the sums of all keys; the gradients of a part travel with
it, and reach its owner after N hops. A part that no query of a rank sees is passed on and not
computed. Memory beside the own part: one part on its way, in backward two and their gradients in
fp32. Received, h = G K: forward 2 S h (N - 1) / N numbers; backward as many again, and 2 S h of
gradients in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.comm.collectives.transport import Pending
from pyops.context_parallel.gathered import Outer
from pyops.context_parallel.peers import wide_dtype
from pyops.ops.attention import (
    AttentionGradients,
    attention_gradients,
    attention_with_lse,
    merge,
)

__all__ = ["ring_attention"]


def ring_attention(q: Tensor, k: Tensor, v: Tensor, outer: Outer) -> Tensor:
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
    y: Tensor = _Ring.apply(q, k, v, bias.scores, bias.table, outer)  # type: ignore[no-untyped-call]
    return y


class _Travelling:
    """The part of keys and values that is at hand, and the next one on its way."""

    def __init__(self, k: Tensor, v: Tensor, outer: Outer) -> None:
        self._peers, self._places = outer.peers, outer.keys
        self._here = torch.stack([k, v])
        self._coming: tuple[Tensor, Pending] | None = None
        self.step = 0

    @property
    def places(self) -> Tensor:
        """Of the part at hand."""
        return self._places[(self._peers.index - self.step) % self._peers.size]

    @property
    def kv(self) -> tuple[Tensor, Tensor]:
        """The part at hand."""
        return self._here[0], self._here[1]

    def start(self) -> None:
        """Start to pass the part on, unless it has been everywhere."""
        if self.step < self._peers.size - 1:
            self._coming = self._peers.pass_on(self._here)

    def turn(self) -> None:
        """Wait for the next part."""
        if self._coming is not None:
            self._here, pending = self._coming
            pending.wait()
            self._coming = None
        self.step += 1


class _Ring(torch.autograd.Function):
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
        travelling, found = _Travelling(k, v, outer), None
        wide = wide_dtype(q.dtype)
        for _ in range(outer.peers.size):
            travelling.start()
            places = travelling.places
            if not problem.sees_nothing(outer.queries, places):
                call = problem.call(outer.queries, places, whole=False)
                y, lse = attention_with_lse(q, *travelling.kv, **call)
                found = (y.to(wide), lse) if found is None else merge(*found, y, lse)
            travelling.turn()
        if found is None:
            B, n, H, _ = q.shape
            found = torch.zeros_like(q, dtype=wide), q.new_full((B, H, n), -torch.inf, dtype=wide)
        y, lse = found[0].to(q.dtype).contiguous(), found[1]
        ctx.outer = outer
        ctx.save_for_backward(q, k, v, scores, table, y, lse)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        q, k, v, scores, table, y, lse = ctx.saved_tensors
        outer: Outer = ctx.outer
        peers, problem = outer.peers, outer.problem.with_tensors(scores, table)
        sums = _Sums(q, scores, table, wanted=ctx.needs_input_grad[3:5])
        travelling = _Travelling(k, v, outer)
        dkv, home = torch.zeros((2, *k.shape), dtype=wide_dtype(k.dtype), device=k.device), None
        for _ in range(peers.size):
            travelling.start()
            places, found = travelling.places, None
            if not problem.sees_nothing(outer.queries, places):
                call = problem.call(outer.queries, places, whole=False)
                found = attention_gradients(
                    (dy, y, lse), (q, *travelling.kv), **call, wanted=sums.wanted
                )
                sums.add(found, places)
            if home is not None:  # the sums that belong to the part at hand
                dkv, pending = home
                pending.wait()
            if found is not None:
                dkv[0] += found.k
                dkv[1] += found.v
            travelling.turn()
            if peers.size > 1:
                home = peers.pass_on(dkv)
        if home is not None:
            dkv, pending = home
            pending.wait()
        dk, dv = dkv.to(k.dtype)
        return *sums.of_queries(), dk, dv, *sums.of_bias(), None


class _Sums:
    """Gradients of this rank's queries and bias, summed over the parts of the keys in fp32."""

    def __init__(
        self, q: Tensor, scores: Tensor | None, table: Tensor | None, *, wanted: tuple[bool, bool]
    ) -> None:
        wide = wide_dtype(q.dtype)
        self.wanted = wanted
        self._q, self._dtype = torch.zeros_like(q, dtype=wide), q.dtype
        self._like = (scores, table)
        self._scores = torch.zeros_like(scores, dtype=wide) if wanted[0] else None  # type: ignore[arg-type]
        self._table = torch.zeros_like(table, dtype=wide) if wanted[1] else None  # type: ignore[arg-type]

    def add(self, found: AttentionGradients, places: Tensor) -> None:
        """Add what the keys at these places give."""
        self._q += found.q
        if self._scores is not None:
            assert found.scores is not None
            more = found.scores.to(self._scores.dtype)
            if self._scores.shape[-1] == 1:
                self._scores += more
            else:
                self._scores.index_add_(-1, places, more)
        if self._table is not None:
            assert found.table is not None
            self._table += found.table

    def of_queries(self) -> tuple[Tensor]:
        """The gradient of q."""
        return (self._q.to(self._dtype),)

    def of_bias(self) -> list[Tensor | None]:
        """The gradients of scores and table."""
        return [
            None if total is None or like is None else total.to(like.dtype)
            for total, like in zip((self._scores, self._table), self._like, strict=True)
        ]
