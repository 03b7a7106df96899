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

from pyops.context_parallel.layout_parts import layout_of_heads, layout_part
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
    """Tokens of the row of queries."""
    num_keys: int
    """Tokens of the row of keys: the same one, but in cross-attention."""
    scale: float
    """Of the scores."""
    mask: AttentionMask
    """Documents and keys are of the whole row, in the order of its places."""
    bias: AttentionBias
    """`scores` is broadcastable to [B, H, length, num_keys]."""
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
            T = self.length if dropout.num_queries is None else dropout.num_queries
            S = self.num_keys if dropout.num_keys is None else dropout.num_keys
            stride = dropout.row_stride
            dropout = replace(
                dropout,
                first_head=dropout.first_head + heads.start,
                num_heads=total,
                num_queries=T,
                num_keys=S,
                row_stride=total * T * S if stride is None else stride,
            )
        mask = self.mask
        if mask.layout is not None:
            mask = replace(mask, layout=layout_of_heads(mask.layout, heads.start, heads.stop))
        return replace(self, mask=mask, bias=bias, dropout=dropout)

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
            ids, others = pair(mask)
            both = ids.index_select(1, queries), others.index_select(1, keys)
            mask = replace(mask, documents=both)
        if mask.layout is not None:
            causal = mask.causal or mask.layout.causal
            mask = replace(
                mask, causal=causal, layout=layout_part(mask.layout, queries, keys, causal=causal)
            )
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
        """Whether none of the queries sees any of the keys, by their places, documents and blocks.
        On a GPU only what needs no waiting is looked at: nothing."""
        if queries.device.type != "cpu":
            return False
        mask = self.mask
        first, last = int(queries.min()), int(queries.max())
        low, high = int(keys.min()), int(keys.max())
        before, after = mask.window or (None, None)
        layout = mask.layout
        causal = mask.causal or (layout is not None and layout.causal)
        if causal and low > last:
            return True
        if layout is not None:
            part = layout_part(layout, queries, keys, causal=causal)
            if not bool(part.counts.any()):
                return True
        if (before is not None and high < first - before) or (
            after is not None and low > last + after
        ):
            return True
        if mask.documents is None:
            return False
        ids, others = pair(mask)
        mine, theirs = ids.index_select(1, queries), others.index_select(1, keys)
        return not any(
            bool(torch.isin(theirs[row], mine[row][mine[row] >= 0]).any())
            for row in range(len(ids))
        )


def pair(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """Documents of queries and of keys."""
    documents = mask.documents
    assert documents is not None
    return (documents, documents) if isinstance(documents, Tensor) else documents
