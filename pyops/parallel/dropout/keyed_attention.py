"""torch's scaled_dot_product_attention with the dropout of a stream, and without its weights in
memory.

    call.query, key, value, attn_mask, dropout_p  ->  pyops.ops.attention, which drops by counters
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.attention import AttentionBias, AttentionDropout, AttentionMask, attention
from pyops.ops.layers.dropout import dropout
from pyops.ops.library import has_kernel

__all__ = ["AttentionCall", "keyed_attention"]

# Of the weights' shape, the probability, and the device.
DropoutOf = Callable[[tuple[int, ...], float, torch.device], AttentionDropout]


class AttentionCall(NamedTuple):
    """The arguments of torch's scaled_dot_product_attention, in their order."""

    query: Tensor
    """[B, H, T, K]."""
    key: Tensor
    """[B, G, S, K], where H is a multiple of G with enable_gqa, and else equal to it."""
    value: Tensor
    """[B, G, S, V]."""
    attn_mask: Tensor | None = None
    """bool, True where a key is seen, or numbers that are added to the scores."""
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def keyed_attention(call: AttentionCall, dropout_of: DropoutOf) -> Tensor:
    """What torch's function would give, [B, H, T, V], with weights that are dropped by counters.

    Args:
        call: Its arguments.
        dropout_of: Gives the dropout of weights of a shape.
    """
    query, key = call.query, call.key
    shape = (*query.shape[:-1], key.shape[-2])
    drop = dropout_of(shape, call.dropout_p, query.device)
    scale = query.shape[-1] ** -0.5 if call.scale is None else call.scale
    odd = query.dim() not in (3, 4) or query.shape[0] != key.shape[0]
    if odd or not _has_kernel(query.device):
        return _by_scores(call, drop, scale)
    # Without heads: one.
    q, k, v = (
        (x if x.dim() == 4 else x.unsqueeze(1)).transpose(1, 2) for x in (query, key, call.value)
    )
    width = v.shape[-1]
    if missing := width - q.shape[-1]:  # zeros, which change no product
        q, k = (functional.pad(x, (0, max(missing, 0))) for x in (q, k))
        v = functional.pad(v, (0, max(-missing, 0)))
    keys, scores = _mask(call, q)
    y = attention(
        q,
        k,
        v,
        scale=scale,
        mask=AttentionMask(causal=call.is_causal, keys=keys),
        bias=AttentionBias(scores=scores),
        dropout=drop,
    )
    return y[..., :width].transpose(1, 2).reshape(*query.shape[:-1], width)


def _has_kernel(device: torch.device) -> bool:
    return device.type != "cuda" or has_kernel("attention_forward", "cuda")


def _mask(call: AttentionCall, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The mask as keys that are seen, bool [B, S], or as numbers that are added to the scores."""
    mask = call.attn_mask
    if mask is None:
        return None, None
    if call.query.dim() == 3 and mask.dim() == 3:
        mask = mask.unsqueeze(1)
    if mask.dtype != torch.bool:
        kept = mask.dtype in (q.dtype, torch.float32)
        return None, mask if kept else mask.to(q.dtype)
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] == 1 and (mask.shape[2] == 1 or mask.stride(2) == 0):
        return mask[:, 0, 0].expand(q.shape[0], call.key.shape[-2]), None
    added = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device)
    return None, added.masked_fill(~mask, -math.inf)


def _by_scores(call: AttentionCall, drop: AttentionDropout, scale: float) -> Tensor:
    """With weights that are made explicitly, on a device without a kernel of attention."""
    query, key, value, mask = call.query, call.key, call.value, call.attn_mask
    if call.enable_gqa:
        key, value = (
            x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value)
        )
    # The softmax is computed in fp32 at least, and kept for backward in 16 bits.
    scores = (query @ key.transpose(-1, -2) * scale).to(
        torch.promote_types(query.dtype, torch.float32)
    )
    if call.is_causal:
        T, S = scores.shape[-2:]
        mask = torch.ones(T, S, dtype=torch.bool, device=query.device).tril()
    seen = mask if mask is not None and mask.dtype == torch.bool else None
    if seen is not None:
        # The smallest number in place of -inf: a query that sees nothing gives zeros, no NaN.
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1)
    if seen is not None:
        weights = weights.masked_fill(~seen, 0.0)
    weights = weights.to(value.dtype)
    assert drop.row_stride is not None
    weights = dropout(
        weights,
        p=drop.p,
        state=drop.state,
        row=max(weights[0].numel(), 1),
        row_stride=drop.row_stride,
    )
    return weights @ value
