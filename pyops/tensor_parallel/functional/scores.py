"""The part of attention between its projections: rotary positions, scores, softmax, values.

q, k, v, seen, bias, dropout --> pyops.ops.attention, which makes no tensor of queries x keys
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyops.ops.attention import (
    AttentionBias,
    AttentionDropout,
    AttentionMask,
    BlockLayout,
    attention,
)

__all__ = [
    "Core",
    "DistanceBias",
    "ScoreDropout",
    "Seen",
    "attend",
    "rotary_tables",
]


class Seen(NamedTuple):
    """Which keys a query sees: those that every field allows; a tuple, so that recomputation finds
    its tensors."""

    causal: bool = False
    """A query sees the key of its own place and those before it."""
    mask: Tensor | None = None
    """bool [B, S] or [B, T, S], True where a key may be seen."""
    documents: Tensor | None = None
    """int32 [B, T]: a token sees its own document alone; -1 is padding."""
    layout: BlockLayout | None = None
    """Of a sparse pattern."""
    places: tuple[Tensor, Tensor] | None = None
    """int64 [T] and [S], places of queries and keys in the row, by which causality and distances
    go; None: 0, 1, 2, ... for both."""


class DistanceBias(NamedTuple):
    """What is added to the scores by the distance of key and query, without a tensor of queries x
    keys; a tuple, so that recomputation finds its tensors."""

    table: Tensor | None = None
    """[num_buckets, H]: T5's, learned."""
    max_distance: int = 128
    """From here on distances share the last bucket of the table."""
    bidirectional: bool = True
    """Half of the buckets are for keys behind the query."""
    slopes: Tensor | None = None
    """[H]: ALiBi (Press et al., arXiv:2108.12409), -slope * |distance|."""


class ScoreDropout(NamedTuple):
    """Dropout of attention weights by counters; a tuple, so that recomputation finds its tensor."""

    p: float
    """Probability with which a weight is dropped."""
    state: Tensor
    """int64 [2]: the key, and the counter of the first weight; see `dropout_state`."""
    row_stride: int
    """How far the counters of a sequence lie behind those of the one before."""


EVERYTHING = Seen()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    seen: Seen = EVERYTHING,
    bias: Tensor | DistanceBias | None = None,
    dropout: ScoreDropout | None = None,
) -> Tensor:
    """Attention of queries to keys: softmax(q k^T scale + bias) v.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K], where H is a multiple of G.
        v: [B, S, G, K].
        scale: factor of the scores.
        seen: which keys a query sees.
        bias: [1 or B, H, T, S], added to the scores; or by distance.
        dropout: of the attention weights.

    Returns:
        [B, T, H K] in the dtype of q.

    Raises:
        ValueError: the mask is of another dtype, or has another number of dimensions.
    """
    _check_mask(seen.mask)
    keys, scores = seen.mask, bias if isinstance(bias, Tensor) else None
    distance = bias if isinstance(bias, DistanceBias) else DistanceBias()
    if scores is not None and scores.dtype not in (q.dtype, torch.float32):
        scores = scores.to(q.dtype)
    if keys is not None and keys.dim() == 3:  # it has queries x keys itself
        added = torch.zeros(keys.shape, dtype=q.dtype, device=q.device)
        added = added.masked_fill(~keys, -math.inf)[:, None]
        keys, scores = None, added if scores is None else scores + added
    return attention(
        q,
        k,
        v,
        scale=scale,
        mask=AttentionMask(
            causal=seen.causal,
            keys=keys,
            documents=seen.documents,
            places=seen.places,
            layout=seen.layout,
        ),
        bias=AttentionBias(scores, *distance),
        dropout=None
        if dropout is None
        else AttentionDropout(dropout.p, dropout.state, row_stride=dropout.row_stride),
    ).flatten(2)


class Core(nn.Module):
    """`attend` as a module without parameters, so that it can be named: to be recomputed in
    backward, say."""

    def lengths(self, queries: int, keys: int) -> tuple[int, int]:
        """Queries and keys of a whole row, by which dropout counts, where q and k have so many."""
        return queries, keys

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        seen: Seen = EVERYTHING,
        bias: Tensor | DistanceBias | None = None,
        dropout: ScoreDropout | None = None,
    ) -> Tensor:
        """As `attend`."""
        return attend(q, k, v, scale=scale, seen=seen, bias=bias, dropout=dropout)


def _check_mask(mask: Tensor | None) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.dim() not in (2, 3)):
        raise ValueError(
            "mask must be bool, [B, S] or [B, T, S], True where a key may be seen; "
            f"got {mask.dtype} {mask.shape}"
        )


def rotary_tables(
    length: int, width: int, *, base: float = 10000.0, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """Tables of rotary positions (Su et al., arXiv:2104.09864, section 3.2).

    Args:
        length: number of positions.
        width: width of a head, even.
        base: of the frequencies.
        device: where the tables are.

    Returns:
        (cos, sin), each fp32 [length, width / 2], of position * base^(-2 i / width) for pair i,
        computed in fp64.
    """
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float().to(device), angle.sin().float().to(device)
