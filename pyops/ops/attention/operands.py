"""The arguments of the attention ops as their schema has them, and how they are made of the public
ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.distance import relative_buckets

__all__ = ["Operands", "Options", "operands_of", "options_of", "wide_dtype"]


class Operands(NamedTuple):
    """Tensors beside q, k and v, in the order of the schema."""

    bias: Tensor | None
    """[1 or B, 1 or H, 1 or T, S], of q's dtype or wide (float64 for float64, else float32)."""
    table: Tensor | None
    """wide [num_buckets, H]."""
    buckets: Tensor | None
    """int32 [2 reach + 1]: the row of `table` for distances -reach to reach."""
    slopes: Tensor | None
    """wide [H]."""
    mask: Tensor | None
    """bool [B, S]."""
    query_documents: Tensor | None
    """int32 [B, T]; -1: padding."""
    key_documents: Tensor | None
    """int32 [B, S]."""
    query_places: Tensor | None
    """int64 [T]; None: 0, 1, 2, ..."""
    key_places: Tensor | None
    """int64 [S]."""
    row_counts: Tensor | None
    """int32 [1 or H, query blocks]: how many key blocks a query block sees."""
    row_indices: Tensor | None
    """int32 [1 or H, query blocks, most]: which, ascending."""
    column_counts: Tensor | None
    """int32 [1 or H, key blocks]: by how many query blocks a key block is seen."""
    column_indices: Tensor | None
    """int32 [1 or H, key blocks, most]: which, ascending."""
    state: Tensor | None
    """int64 [2]: key, and counter of the first weight."""


class Options(NamedTuple):
    """Numbers, in the order of the schema."""

    scale: float
    """Of the scores."""
    soft_cap: float
    """c of c tanh(score / c); 0: none."""
    causal: bool
    """Whether a query sees nothing after its place."""
    before: int
    """Places before its own that a query sees; -1: all."""
    after: int
    """Places after its own that a query sees; -1: all."""
    block: int
    """Tokens of a block of the layout; 0: no layout."""
    p: float
    """Probability of a weight to be dropped."""
    first: int
    """Added to the counter in `state`."""
    row_stride: int
    """From the counters of a row to those of the next."""
    num_queries: int
    """Queries of a whole row."""
    num_keys: int
    """Keys of a whole row."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of `dtype` are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operands_of(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    bias: AttentionBias,
    dropout: AttentionDropout | None,
) -> Operands:
    """Checked arguments as the ops take them; views and casts, which autograd goes through."""
    wide, S = wide_dtype(q.dtype), k.shape[1]
    scores = bias.scores
    if scores is not None:
        scores = scores[(None,) * (4 - scores.dim())]
        if q.dtype == torch.float64:
            scores = scores.double()
        if scores.shape[-1] != S:
            scores = scores.expand(*scores.shape[:-1], S)
    buckets = None
    if bias.table is not None:
        buckets = relative_buckets(
            bias.table.shape[0],
            max_distance=bias.max_distance,
            bidirectional=bias.bidirectional,
            device=q.device,
        )
    documents: tuple[Tensor | None, Tensor | None] = (None, None)
    if mask.documents is not None:
        both = mask.documents
        documents = (both, both) if isinstance(both, Tensor) else both
    query_places, key_places = mask.places if mask.places is not None else (None, None)
    rows: tuple[Tensor | None, Tensor | None] = (None, None)
    columns = rows
    if mask.layout is not None:
        rows = (mask.layout.counts, mask.layout.indices)
        columns = (mask.layout.column_counts, mask.layout.column_indices)
    return Operands(
        bias=scores,
        table=None if bias.table is None else bias.table.to(wide),
        buckets=buckets,
        slopes=None if bias.slopes is None else bias.slopes.detach().to(wide),
        mask=mask.keys,
        query_documents=documents[0],
        key_documents=documents[1],
        query_places=query_places,
        key_places=key_places,
        row_counts=rows[0],
        row_indices=rows[1],
        column_counts=columns[0],
        column_indices=columns[1],
        state=dropout.state if dropout is not None and dropout.p > 0 else None,
    )


def options_of(
    q: Tensor,
    k: Tensor,
    mask: AttentionMask,
    dropout: AttentionDropout | None,
    *,
    scale: float,
    soft_cap: float | None,
) -> Options:
    """Checked arguments as the ops take them."""
    before, after = (-1 if n is None else n for n in mask.window or (None, None))
    T, S, H = q.shape[1], k.shape[1], q.shape[2]
    first = row_stride = 0
    if dropout is not None and dropout.p > 0:
        T = T if dropout.num_queries is None else dropout.num_queries
        S = S if dropout.num_keys is None else dropout.num_keys
        H = H if dropout.num_heads is None else dropout.num_heads
        row_stride = H * T * S if dropout.row_stride is None else dropout.row_stride
        first = dropout.first_row * row_stride + dropout.first_head * T * S
    return Options(
        scale=scale,
        soft_cap=soft_cap or 0.0,
        causal=mask.causal or (mask.layout is not None and mask.layout.causal),
        before=before,
        after=after,
        block=0 if mask.layout is None else mask.layout.block,
        p=dropout.p if dropout is not None else 0.0,
        first=first,
        row_stride=row_stride,
        num_queries=T,
        num_keys=S,
    )
