"""What attention is told beside q, k and v: which keys a query sees, what is added to the scores,
and which weights are dropped."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyops.ops.attention.block_layout import BlockLayout

__all__ = ["AttentionBias", "AttentionDropout", "AttentionMask"]


@dataclass(frozen=True)
class AttentionMask:
    """Which keys each query sees: those that every field allows. The default allows all.

    Places are those of tokens in the whole row that T queries and S keys are parts of. Causality,
    the window, the distances of `AttentionBias` and the counters of `AttentionDropout` are made of
    them, never of the places within q and k.
    """

    causal: bool = False
    """A query sees the keys at its own place and before it."""
    window: tuple[int | None, int | None] | None = None
    """(before, after): how many places before its own and after it a query sees; None: all."""
    keys: Tensor | None = None
    """bool [B, S]: False for keys that no query sees, such as padding."""
    documents: Tensor | tuple[Tensor, Tensor] | None = None
    """int32 [B, T], the document that each token belongs to, or the pair of queries' [B, T] and
    keys' [B, S]. A query sees its own document; -1 is padding, which sees and is seen by nothing.
    Ids may come in any order; equal ones that stand together cost least."""
    places: tuple[Tensor, Tensor] | None = None
    """int64 [T] and int64 [S], places of the queries and of the keys in the whole row, each 0 or
    more and none twice; None: 0, 1, 2, ... for both. Ascending stretches cost least."""
    layout: BlockLayout | None = None
    """Which blocks of keys each block of queries sees, by their order within q and k, not by
    `places`. One that is causal makes the whole causal."""


@dataclass(frozen=True)
class AttentionBias:
    """What is added to the scores, in sum."""

    scores: Tensor | None = None
    """Broadcastable to [B, H, T, S], in the dtype of q or in float32, with a gradient of its own
    shape. Where the last dimension is 1 and S is not, the gradient takes [.., T, S] in between."""
    table: Tensor | None = None
    """[num_buckets, H]: T5's relative position bias (Raffel et al., arXiv:1910.10683, section
    2.1), with a gradient; nothing of T x S is made of it."""
    max_distance: int = 128
    """Distance from which on all share the last bucket of `table`."""
    bidirectional: bool = True
    """Whether keys after the query have half of the buckets of `table`, as in T5's encoder, or
    share that of distance 0, as in its decoder."""
    slopes: Tensor | None = None
    """[H]: ALiBi (Press et al., arXiv:2108.12409): -slope * |distance|; without a gradient."""


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights by counters: the same weights are dropped however heads, rows
    and tokens are divided among ranks.

    The weight of row b, head h, query place t, key place s has the counter state[1] +
    (first_row + b) * row_stride + ((first_head + h) * num_queries + t) * num_keys + s, and is kept
    where the uniform number of `pyops.random` at that counter is p or more.
    """

    p: float
    """Probability with which a weight is dropped, from 0 up to but not including 1."""
    state: Tensor | None = None
    """int64 [2] on q's device: the key, and the counter of the first weight; see
    `pyops.ops.layers.dropout.dropout_state`."""
    first_row: int = 0
    """Which row of the whole batch q's first one is."""
    first_head: int = 0
    """Which of the whole's heads q's first one is."""
    num_heads: int | None = None
    """Heads of the whole; None: those of q."""
    num_queries: int | None = None
    """Queries of a whole row, without those at its end that are padding by their documents in every
    row; None: those of q."""
    num_keys: int | None = None
    """Keys of a whole row, as `num_queries`; None: those of k."""
    row_stride: int | None = None
    """How far the counters of a row lie behind those of the one before; None: num_heads *
    num_queries * num_keys."""
