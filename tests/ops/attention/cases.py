"""Attention with explicit scores, written for the tests alone: for any dtype, with autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyops import random
from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.random import signed64

SEED, NAME = 23, "attention.dropout@5"


def state_at(offset: int, device: torch.device | None = None) -> Tensor:
    """Key and first counter of the tests' stream."""
    return torch.tensor([signed64(random.key_of(SEED, NAME)), offset], device=device)


def heads(
    B: int, n: int, H: int, K: int, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Tensor:
    """[B, n, H, K] in which heads and rows are of different sizes, so that one can't stand in for
    another; a view with gaps between heads."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, n, H, K + 3, generator=generator, dtype=torch.float64)[..., :K]
    sizes = 1 + torch.arange(H)[:, None] / 10 + torch.arange(B)[:, None, None, None] / 5
    whole = torch.zeros(B, n, H, K + 3, dtype=dtype, device=device)
    whole[..., :K] = (x * sizes).to(dtype)
    return whole[..., :K]


def seen_tokens(q: Tensor, k: Tensor, mask: AttentionMask) -> Tensor:
    """bool [1 or B, 1 or H, T, S], pair by pair in plain comparisons."""
    T, S = q.shape[1], k.shape[1]
    query, key = mask.places or (torch.arange(T), torch.arange(S))
    query, key = query.to(q.device)[:, None], key.to(q.device)
    seen = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
    if mask.causal:
        seen = seen & (key <= query)
    if mask.window is not None:
        before, after = (math.inf if n is None else n for n in mask.window)
        seen = seen & (query - key <= before) & (key - query <= after)
    if mask.keys is not None:
        seen = seen & mask.keys[:, None, None]
    if mask.documents is not None:
        pair = mask.documents
        own, other = (pair, pair) if isinstance(pair, Tensor) else pair
        same = own[:, :, None] == other[:, None]
        seen = seen & (same & (own >= 0)[:, :, None])[:, None]
    if mask.layout is not None:
        seen = seen & mask.layout.tokens().to(q.device)[None]
    return seen


def t5_buckets(distance: Tensor, num_buckets: int, max_distance: int, both: bool) -> Tensor:
    """transformers' T5Attention._relative_position_bucket, of key place less query place."""
    buckets = 0
    if both:
        num_buckets //= 2
        buckets = buckets + (distance > 0).long() * num_buckets
        distance = distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = num_buckets // 2
    far = (
        exact
        + (
            torch.log(distance.float() / exact)
            / math.log(max_distance / exact)
            * (num_buckets - exact)
        )
        .clamp(min=-1e6)
        .long()
    )
    far = torch.min(far, torch.full_like(far, num_buckets - 1))
    return buckets + torch.where(distance < exact, distance, far)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    bias: AttentionBias,
    soft_cap: float | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """y and lse in the dtype of q, by autograd."""
    scores = explicit_scores(q, k, scale=scale, mask=mask, bias=bias, soft_cap=soft_cap)
    none = (scores == -torch.inf).all(-1)
    safe = scores.masked_fill(none[..., None], 0.0)
    weights = safe.softmax(-1).masked_fill(none[..., None], 0.0)
    lse = safe.logsumexp(-1).masked_fill(none, -torch.inf)
    if dropout is not None:
        kept = kept_weights(weights, mask, dropout)
        weights = weights * kept / (1 - dropout.p)
    values = v.transpose(1, 2).repeat_interleave(q.shape[2] // v.shape[2], dim=1)
    return (weights @ values).transpose(1, 2), lse


def explicit_scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    mask: AttentionMask,
    bias: AttentionBias,
    soft_cap: float | None = None,
) -> Tensor:
    """[B, H, T, S], -inf where nothing is seen."""
    keys = k.transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    scores = q.transpose(1, 2) @ keys.mT * scale
    T, S = scores.shape[-2:]
    query, key = mask.places or (torch.arange(T), torch.arange(S))
    distance = key.to(q.device) - query.to(q.device)[:, None]
    if soft_cap is not None:
        scores = soft_cap * (scores / soft_cap).tanh()
    if bias.scores is not None:
        scores = scores + bias.scores.to(scores.dtype)
    if bias.table is not None:
        buckets = t5_buckets(distance, len(bias.table), bias.max_distance, bias.bidirectional)
        scores = scores + bias.table.to(scores.dtype)[buckets].permute(2, 0, 1)
    if bias.slopes is not None:
        scores = scores - bias.slopes.to(scores.dtype)[:, None, None] * distance.abs()
    return scores.masked_fill(~seen_tokens(q, k, mask), -torch.inf)


def kept_weights(weights: Tensor, mask: AttentionMask, dropout: AttentionDropout) -> Tensor:
    """The part of the whole's mask, which is drawn whole."""
    B, H, T, S = weights.shape
    query, key = mask.places or (torch.arange(T), torch.arange(S))
    whole_h = dropout.num_heads or H
    whole_t, whole_s = dropout.num_queries or T, dropout.num_keys or S
    assert dropout.state is not None
    shape = (dropout.first_row + B, whole_h, whole_t, whole_s)
    whole = random.dropout_mask(
        SEED, NAME, shape, p=dropout.p, offset=int(dropout.state[1]), device=weights.device
    )
    own = whole[dropout.first_row :, dropout.first_head : dropout.first_head + H]
    return own[:, :, query.to(weights.device)][..., key.to(weights.device)]
