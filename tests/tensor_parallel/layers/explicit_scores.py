"""Attention with explicit scores in plain torch, by autograd: what `attend` is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.attention.distance import relative_buckets
from pyops.ops.layers.dropout import dropout as drop_elements
from pyops.tensor_parallel.functional.scores import EVERYTHING, DistanceBias, ScoreDropout, Seen

__all__ = ["attend_by_scores"]


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
    """As `attend`, with a tensor [B, H, T, S]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    visible, added = _visible(q, k, seen), _bias(q, k, bias)
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


def _distance(q: Tensor, k: Tensor) -> Tensor:
    """int64 [T, S], the key's place less the query's."""
    places = torch.arange(k.shape[2], device=q.device)
    return places - torch.arange(q.shape[2], device=q.device)[:, None]


def _visible(q: Tensor, k: Tensor, seen: Seen) -> Tensor | None:
    """bool, which keys a query sees; None: all."""
    parts = []
    if seen.mask is not None:
        parts.append(seen.mask[:, None, None] if seen.mask.dim() == 2 else seen.mask[:, None])
    if seen.causal:
        parts.append(_distance(q, k) <= 0)
    if (ids := seen.documents) is not None:
        parts.append(((ids[:, :, None] == ids[:, None]) & (ids[:, None] >= 0))[:, None])
    if seen.layout is not None:
        parts.append(seen.layout.tokens())
    visible: Tensor | None = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible


def _bias(q: Tensor, k: Tensor, bias: Tensor | DistanceBias | None) -> Tensor | None:
    """[1 or B, H, T, S] or [H, T, S] in the dtype of q."""
    if not isinstance(bias, DistanceBias):
        return None if bias is None else bias.to(q.dtype)
    found: Tensor | None = None
    distance, most = _distance(q, k), bias.max_distance
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
