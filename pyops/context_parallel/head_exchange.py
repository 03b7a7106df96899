"""Tokens for heads: each rank gives all heads of its tokens, and gets some heads of all tokens.

    rank 0   tokens 0-3, heads 0 1 2 3          tokens 0-7, heads 0 1
    rank 1   tokens 4-7, heads 0 1 2 3    <->   tokens 0-7, heads 2 3

DeepSpeed-Ulysses (Jacobs et al., arXiv:2309.14509). q, k and v go in one message, y in another.
Ranks that do not divide the heads have one head more or less. Where there are fewer heads of keys
than ranks, each goes to all ranks whose queries see it, and the gradients of its copies are summed
in rank order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyops.context_parallel.peers import Peers, wide_dtype
from pyops.context_parallel.problem import Heads

__all__ = ["HeadExchange", "copied_heads"]


def copied_heads(start: int, stop: int, each: int) -> list[int] | None:
    """For each query head from `start` up to `stop` that of keys, among those that they see, where
    these query heads do not share them evenly; None where they do.

    Args:
        start, stop: Query heads.
        each: How many share a head of keys.
    """
    of_query = [head // each - start // each for head in range(start, stop)]
    H, G = len(of_query), of_query[-1] + 1
    even = H % G == 0 and of_query == [head * G // H for head in range(H)]
    return None if even else of_query


@dataclass(frozen=True)
class HeadExchange:
    """Ranks that exchange tokens for heads.

    Raises:
        ValueError: There are fewer heads than ranks.
    """

    peers: Peers
    """The ranks."""
    positions: tuple[Tensor, ...]
    """int64 [n] for each rank: where its queries stand among those of all these ranks, which are in
    ascending order of their places."""
    key_positions: tuple[Tensor, ...]
    """int64 [m] for each rank: the same of its keys."""
    num_heads: int
    """H, of the queries."""
    num_kv_heads: int
    """G, of keys and values."""

    def heads(self, rank: int) -> Heads:
        """The query heads that a rank gets."""
        start, stop = (r * self.num_heads // self.peers.size for r in (rank, rank + 1))
        return Heads(start, stop, self.num_heads)

    def kv_heads(self, rank: int) -> slice:
        """The heads of keys that a rank gets: those that its queries see."""
        mine, each = self.heads(rank), self.num_heads // self.num_kv_heads
        return slice(mine.start // each, (mine.stop - 1) // each + 1)

    @property
    def own(self) -> Heads:
        """The query heads of this rank."""
        return self.heads(self.peers.index)

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Own tokens, all heads -> all tokens, own heads.

        Args:
            q: [B, n, H, K].
            k: [B, m, G, K].
            v: [B, m, G, K].

        Returns:
            [B, ranks n, own H, K], and twice [B, ranks m, own G, K]. Where the own query heads do
            not share those of keys evenly, each has a copy of its own.
        """
        q, k, v = _ToHeads.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        mine, each = self.own, self.num_heads // self.num_kv_heads
        if (copied := copied_heads(mine.start, mine.stop, each)) is not None:
            index = torch.tensor(copied, device=k.device)
            k, v = (x.index_select(2, index) for x in (k, v))
        return q, k, v

    def to_tokens(self, y: Tensor) -> Tensor:
        """All tokens, own heads -> own tokens, all heads.

        Args:
            y: [B, ranks n, own H, K].

        Returns:
            [B, n, H, K].
        """
        found: Tensor = _ToTokens.apply(y, self)  # type: ignore[no-untyped-call]
        return found

    def gather_tokens(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The exchange of `to_heads`, or of a gradient of `to_tokens`; q, k and v, or one."""
        cuts = [self._cuts(rank) for rank in range(self.peers.size)]
        parts = [
            torch.cat([x[:, :, some].flatten() for x, some in zip(tensors, cut, strict=False)])
            for cut in cuts
        ]
        own = cuts[self.peers.index][: len(tensors)]
        shapes = [
            (x.shape[0], x.shape[1], some.stop - some.start, x.shape[3])
            for x, some in zip(tensors, own, strict=True)
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        found = tuple(
            tensors[0].new_empty(s[0], s[1] * self.peers.size, s[2], s[3]) for s in shapes
        )
        for rank, message in enumerate(self.peers.swap(parts, [sum(sizes)] * self.peers.size)):
            for whole, positions, part, shape in zip(
                found, self._positions(rank, found), message.split(sizes), shapes, strict=True
            ):
                whole.index_copy_(1, positions, part.view(shape))
        return found

    def scatter_tokens(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The way back; what several ranks have of a head is summed."""
        parts = [
            torch.cat(
                [
                    x.index_select(1, positions).flatten()
                    for x, positions in zip(tensors, self._positions(rank, tensors), strict=True)
                ]
            )
            for rank in range(self.peers.size)
        ]
        B, K = tensors[0].shape[0], tensors[0].shape[3]
        totals = (self.num_heads, self.num_kv_heads, self.num_kv_heads)[: len(tensors)]
        cuts = [self._cuts(rank)[: len(tensors)] for rank in range(self.peers.size)]
        wide = wide_dtype(tensors[0].dtype)
        found = [
            torch.zeros((B, len(positions), total, K), dtype=wide, device=tensors[0].device)
            for positions, total in zip(
                self._positions(self.peers.index, tensors), totals, strict=True
            )
        ]
        sizes = [
            [
                B * whole.shape[1] * (some.stop - some.start) * K
                for some, whole in zip(cut, found, strict=True)
            ]
            for cut in cuts
        ]
        messages = self.peers.swap(parts, [sum(each) for each in sizes])
        for cut, each, message in zip(cuts, sizes, messages, strict=True):
            for whole, some, part in zip(found, cut, message.split(each), strict=True):
                whole[:, :, some] += part.view(B, whole.shape[1], -1, K)
        return tuple(whole.to(tensors[0].dtype) for whole in found)

    def _positions(self, rank: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Where the tokens of a rank stand: of q, k and v, or of one."""
        keys = self.key_positions[rank]
        return (self.positions[rank], keys, keys)[: len(tensors)]

    def _cuts(self, rank: int) -> tuple[slice, slice, slice]:
        mine, kv = self.heads(rank), self.kv_heads(rank)
        return slice(mine.start, mine.stop), kv, kv


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, exchange: HeadExchange) -> Any:
        ctx.exchange = exchange
        return exchange.gather_tokens((q, k, v))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *ctx.exchange.scatter_tokens(gradients), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.scatter_tokens((y,))[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ctx.exchange.gather_tokens((dy,))[0], None
