"""The part of attention between its projections: rotary positions, scores, softmax, values.

    q, k, v, seen, bias, dropout --> pyops.ops.attention, which makes no tensor of queries x keys

CUDA without its kernel has torch's attention where there is nothing but q, k and v, and else
`attend_by_scores`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.ops.attention import (
    AttentionBias,
    AttentionDropout,
    AttentionMask,
    BlockLayout,
    attention,
)
from pyops.ops.attention.distance import relative_buckets
from pyops.ops.layers.dropout import dropout as drop_elements
from pyops.ops.library import has_kernel

__all__ = [
    "Core",
    "DistanceBias",
    "ScoreDropout",
    "Seen",
    "attend",
    "attend_by_scores",
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
    if q.device.type == "cuda" and not _cuda_has_kernel():
        if bias is None and dropout is None and all(field is None for field in seen[1:]):
            return _by_torch(q, k, v, scale=scale, causal=seen.causal)
        return attend_by_scores(q, k, v, scale=scale, seen=seen, bias=bias, dropout=dropout)
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


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _cuda_has_kernel() -> bool:
    return has_kernel("attention_forward", "cuda")


def _by_torch(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] > k.shape[1]
    )
    return y.transpose(1, 2).flatten(2)


def attend_by_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    seen: Seen = EVERYTHING,
    bias: Tensor | DistanceBias | None = None,
    dropout: ScoreDropout | None = None,
) -> Tensor:
    """As `attend`, with a tensor [B, H, T, S]: for devices without a kernel of attention, and the
    reference of tests.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K].
        v: [B, S, G, K].
        scale: factor of the scores.
        seen: which keys a query sees.
        bias: added to the scores.
        dropout: of the attention weights.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    distance = _distance(q, k, seen.places)
    visible, added = _visible(distance, seen), _bias(q, distance, bias)
    groups = q.shape[1] // k.shape[1]
    if dropout is None:
        if added is None:
            added = visible
        elif visible is not None:
            added = added.masked_fill(~visible, -math.inf)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=added, scale=scale, enable_gqa=groups > 1
        )
        return y.transpose(1, 2).flatten(2)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if added is not None:
        scores = scores + added
    if visible is not None:
        # The smallest number in place of -inf: a query that sees nothing gives zeros, no NaN.
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    # The softmax is computed in fp32 at least, and kept for backward in 16 bits.
    weights = scores.softmax(dim=-1).to(q.dtype)
    if visible is not None:
        weights = weights.masked_fill(~visible, 0.0)
    weights = drop_elements(
        weights,
        p=dropout.p,
        state=dropout.state,
        row=weights[0].numel(),
        row_stride=dropout.row_stride,
    )
    return (weights @ v).transpose(1, 2).flatten(2)


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


def _distance(q: Tensor, k: Tensor, places: tuple[Tensor, Tensor] | None) -> Tensor:
    """int64 [T, S], the key's place less the query's."""
    if places is None:
        queries, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    else:
        queries, keys = places
    return keys - queries[:, None]


def _visible(distance: Tensor, seen: Seen) -> Tensor | None:
    """bool, which keys a query sees; None: all."""
    parts = []
    if seen.mask is not None:
        parts.append(seen.mask[:, None, None] if seen.mask.dim() == 2 else seen.mask[:, None])
    if seen.causal:
        parts.append(distance <= 0)
    if (ids := seen.documents) is not None:
        parts.append(((ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0))[:, None])
    if seen.layout is not None:
        parts.append(seen.layout.tokens())
    visible: Tensor | None = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def _bias(q: Tensor, distance: Tensor, bias: Tensor | DistanceBias | None) -> Tensor | None:
    """[1 or B, H, T, S] or [H, T, S] in the dtype of q."""
    if not isinstance(bias, DistanceBias):
        return None if bias is None else bias.to(q.dtype)
    found: Tensor | None = None
    most = bias.max_distance
    if bias.table is not None:
        buckets = relative_buckets(
            bias.table.shape[0],
            max_distance=most,
            bidirectional=bias.bidirectional,
            device=q.device,
        )
        place = buckets[distance.clamp(-most, most) + most]
        found = functional.embedding(place, bias.table).permute(2, 0, 1)
    if bias.slopes is not None:
        fall = -bias.slopes[:, None, None] * distance.abs()
        found = fall if found is None else found + fall
    return None if found is None else found.to(q.dtype)


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
