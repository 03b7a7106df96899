"""torch's scaled_dot_product_attention with the dropout of a stream, and without its weights in
memory.

    call.query, key, value, attn_mask, dropout_p  ->  attend, which drops by counters
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from pyops.ops.attention import AttentionDropout
from pyops.tensor_parallel.functional.scores import ScoreDropout, Seen, attend

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
    query = call.query
    drop = dropout_of((*query.shape[:-1], call.key.shape[-2]), call.dropout_p, query.device)
    assert drop.state is not None
    assert drop.row_stride is not None
    lead = query.shape[: max(query.dim() - 3, 1)]
    q, k, v = (_of_rows(x, lead).transpose(1, 2) for x in (query, call.key, call.value))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    width = v.shape[-1]
    if missing := width - q.shape[-1]:  # zeros, which change no product
        q, k = (functional.pad(x, (0, max(missing, 0))) for x in (q, k))
        v = functional.pad(v, (0, max(-missing, 0)))
    keys, scores = _mask(call, q, lead)
    y = attend(
        q,
        k,
        v,
        scale=scale,
        seen=Seen(call.is_causal, keys),
        bias=scores,
        dropout=ScoreDropout(drop.p, drop.state, drop.row_stride),
    )
    heads: Tensor = y.unflatten(-1, (q.shape[2], -1))
    return heads[..., :width].transpose(1, 2).reshape(*query.shape[:-1], width)


def _of_rows(x: Tensor, lead: torch.Size) -> Tensor:
    """[rows, heads, T, K]: all dimensions before the heads are one, and a tensor without heads has
    one of them."""
    if x.dim() == 3:
        x = x.unsqueeze(1)
    return x.expand(*lead, *x.shape[-3:]).reshape(-1, *x.shape[-3:])


def _mask(call: AttentionCall, q: Tensor, lead: torch.Size) -> tuple[Tensor | None, Tensor | None]:
    """The mask as keys that are seen, bool [B, S], or as numbers that are added to the scores."""
    mask = call.attn_mask
    if mask is None:
        return None, None
    if mask.dim() > 3 or (mask.dim() == 3 and call.query.dim() == 3):
        mask = _of_rows(mask, lead)
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool:
        return None, mask
    if mask.shape[1] == 1 and (mask.shape[2] == 1 or mask.stride(2) == 0):
        return mask[:, 0, 0].expand(q.shape[0], call.key.shape[-2]), None
    added = torch.zeros(mask.shape, dtype=q.dtype, device=mask.device)
    return None, added.masked_fill(~mask, -math.inf)
