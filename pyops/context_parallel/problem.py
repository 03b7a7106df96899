"""Problem: attention over a whole row as its caller describes it, and the part of it that some
queries, some keys and some heads are.

    keys      0 1 2 3 4 5 6 7        a part goes by places in the whole row: causality, windows,
    queries   . . .                  documents, distances and the counters of dropout are the same
       2 6        #       #          in every part, however tokens and heads are shared out
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask

__all__ = ["Heads", "Problem", "pair"]


@dataclass(frozen=True)
class Heads:
    """Query heads [start, stop) of `total`."""

    start: int
    stop: int
    total: int


@dataclass(frozen=True)
class Problem:
    """What attention over a row of `length` tokens is told beside q, k and v, all of it for the
    whole row and all its heads."""

    length: int
    """Tokens of the row."""
    scale: float
    """Of the scores."""
    mask: AttentionMask
    """Documents and keys are of the whole row, in the order of its places."""
    bias: AttentionBias
    """`scores` is broadcastable to [B, H, length, length]."""
    soft_cap: float | None
    """As for `attention`."""
    dropout: AttentionDropout | None
    """As for `attention`."""

    def of_heads(self, heads: Heads) -> Problem:
        """The problem of some heads alone; differentiable in the bias."""
        bias, dropout, some = self.bias, self.dropout, slice(heads.start, heads.stop)
        scores = bias.scores
        if scores is not None:
            scores = scores[(None,) * (4 - scores.dim())]
            if scores.shape[1] != 1:
                scores = scores[:, some]
        bias = replace(
            bias,
            scores=scores,
            table=None if bias.table is None else bias.table[:, some],
            slopes=None if bias.slopes is None else bias.slopes[some],
        )
        if dropout is not None:
            total = heads.total if dropout.num_heads is None else dropout.num_heads
            queries, keys = (n or self.length for n in (dropout.num_queries, dropout.num_keys))
            stride = dropout.row_stride
            dropout = replace(
                dropout,
                first_head=dropout.first_head + heads.start,
                num_heads=total,
                num_queries=queries,
                num_keys=keys,
                row_stride=total * queries * keys if stride is None else stride,
            )
        return replace(self, bias=bias, dropout=dropout)

    def of_queries(self, places: Tensor) -> Problem:
        """The problem of some rows of the bias; differentiable in it."""
        scores = self.bias.scores
        if scores is None or scores.shape[-2] == 1:
            return self
        return replace(self, bias=replace(self.bias, scores=scores.index_select(-2, places)))

    def with_tensors(self, scores: Tensor | None, table: Tensor | None) -> Problem:
        """The same with other tensors of the bias."""
        return replace(self, bias=replace(self.bias, scores=scores, table=table))

    def call(self, queries: Tensor, keys: Tensor, *, whole: bool) -> dict[str, Any]:
        """Arguments of `attention` for queries and keys at these places.

        Args:
            queries: int64 [t], on the device.
            keys: int64 [s].
            whole: Whether the keys are those of the whole row, in its order.
        """
        mask, bias = self.mask, self.bias
        if mask.keys is not None and not whole:
            mask = replace(mask, keys=mask.keys.index_select(1, keys))
        if mask.documents is not None:
            documents = pair(mask)[0]
            both = documents.index_select(1, queries), documents.index_select(1, keys)
            mask = replace(mask, documents=both)
        if bias.scores is not None and bias.scores.shape[-1] != 1 and not whole:
            bias = replace(bias, scores=bias.scores.index_select(-1, keys))
        return {
            "scale": self.scale,
            "mask": replace(mask, places=(queries, keys)),
            "bias": bias,
            "soft_cap": self.soft_cap,
            "dropout": self.dropout,
        }

    def sees_nothing(self, queries: Tensor, keys: Tensor) -> bool:
        """Whether none of the queries sees any of the keys, by their places and documents. On a GPU
        only what needs no waiting is looked at: nothing."""
        if queries.device.type != "cpu":
            return False
        mask = self.mask
        first, last = int(queries.min()), int(queries.max())
        low, high = int(keys.min()), int(keys.max())
        before, after = mask.window or (None, None)
        if mask.causal and low > last:
            return True
        if (before is not None and high < first - before) or (
            after is not None and low > last + after
        ):
            return True
        if mask.documents is None:
            return False
        ids = pair(mask)[0]
        mine, theirs = ids.index_select(1, queries), ids.index_select(1, keys)
        return not any(
            bool(torch.isin(theirs[row], mine[row][mine[row] >= 0]).any())
            for row in range(len(ids))
        )


def pair(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Documents of queries and of keys."""
    documents = mask.documents
    assert documents is not None
    return (documents, documents) if isinstance(documents, Tensor) else documents
