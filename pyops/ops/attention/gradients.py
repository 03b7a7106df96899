"""The backward op by itself, for attention over parts of the keys that is differentiated by
hand."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyops.ops.attention.arguments import AttentionBias, AttentionDropout, AttentionMask
from pyops.ops.attention.checks import check_attention
from pyops.ops.attention.operands import operands_of, options_of

__all__ = ["AttentionGradients", "attention_gradients"]


class AttentionGradients(NamedTuple):
    """Gradients of what attention was given."""

    q: Tensor
    """[B, T, H, K] in q's dtype."""
    k: Tensor
    """[B, S, G, K] in k's dtype."""
    v: Tensor
    """[B, S, G, K] in v's dtype."""
    scores: Tensor | None
    """Of `AttentionBias.scores`, in its shape and dtype; None where it was not asked for."""
    table: Tensor | None
    """Of `AttentionBias.table`, in its shape and dtype; None where it was not asked for."""


@torch.no_grad()
def attention_gradients(
    outputs: tuple[Tensor, Tensor, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    scale: float,
    mask: AttentionMask,
    bias: AttentionBias,
    soft_cap: float | None = None,
    dropout: AttentionDropout | None = None,
    wanted: tuple[bool, bool] = (False, False),
) -> AttentionGradients:
    """The gradients of `attention` over these keys, which may be a part of those that y is of.

    With y and lse of the attention over all keys, the gradients of a part of the keys are exactly
    that part of the whole ones, and the queries' are summands of the whole one: nothing is scaled
    afterwards.

    Args:
        outputs: the gradient of y [B, T, H, K], and y and lse [B, H, T] over all keys.
        qkv: q, and the part of k and v.
        scale, mask, bias, soft_cap, dropout: as for `attention`, of this part.
        wanted: whether the gradients of `bias.scores` and `bias.table` are.

    Raises:
        ValueError, TypeError: as `attention`.
    """
    (dy, y, lse), (q, k, v) = outputs, qkv
    check_attention(q, k, v, mask, bias, dropout, scale=scale, soft_cap=soft_cap)
    operands = operands_of(q, k, mask, bias, dropout)
    options = options_of(q, k, mask, dropout, scale=scale, soft_cap=soft_cap)
    dq, dk, dv, dscores, dtable = torch.ops.pyops.attention_backward.default(
        dy,
        None,
        y,
        lse,
        q,
        k,
        v,
        *operands,
        **options._asdict(),
        bias_grad=wanted[0] and bias.scores is not None,
        table_grad=wanted[1] and bias.table is not None,
    )
    of_scores = of_table = None
    if wanted[0] and bias.scores is not None:
        shape = (1,) * (4 - bias.scores.dim()) + tuple(bias.scores.shape)
        of_scores = dscores.sum_to_size(shape).view(bias.scores.shape).to(bias.scores.dtype)
    if wanted[1] and bias.table is not None:
        of_table = dtable.to(bias.table.dtype)
    return AttentionGradients(dq, dk, dv, of_scores, of_table)
