"""The part of attention between its projections: rotary positions, scores, softmax, values."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from pyops.ops.layers.dropout import dropout as drop_elements

__all__ = ["Core", "ScoreDropout", "attend", "rotary_tables"]


class ScoreDropout(NamedTuple):
    """Dropout of attention weights by counters; a tuple, so that recomputation finds its tensor."""

    p: float
    """Probability with which a weight is dropped."""
    state: Tensor
    """int64 [2]: the key, and the counter of the first weight; see `dropout_state`."""
    row_stride: int
    """How far the counters of a sequence lie behind those of the one before."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: ScoreDropout | None = None,
) -> Tensor:
    """Attention of queries to keys: softmax(q k^T scale + bias) v.

    Args:
        q: [B, T, H, K].
        k: [B, S, G, K], where H is a multiple of G.
        v: [B, S, G, K].
        scale: factor of the scores.
        causal: a query sees the key of its own place and those before it.
        mask: bool [B, S] or [B, T, S], True where a key may be seen.
        bias: [1 or B, H, T, S], added to the scores.
        dropout: of the attention weights, which are then made explicitly.

    Returns:
        [B, T, H K] in the dtype of q.

    Raises:
        ValueError: the mask is of another dtype, or has another number of dimensions.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    added = _added(
        q, k, causal and (mask is not None or bias is not None or dropout is not None), mask, bias
    )
    groups = q.shape[1] // k.shape[1]
    if dropout is None:
        y = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=added,
            is_causal=causal and added is None,
            scale=scale,
            enable_gqa=groups > 1,
        )
        return y.transpose(1, 2).flatten(2)
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if added is not None:
        scores = (
            scores.masked_fill(~added, -math.inf) if added.dtype == torch.bool else scores + added
        )
    # The softmax is computed in fp32 at least, and kept for backward in 16 bits.
    weights = scores.softmax(dim=-1).to(q.dtype)
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
        causal: bool = False,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        dropout: ScoreDropout | None = None,
    ) -> Tensor:
        """As `attend`."""
        return attend(q, k, v, scale=scale, causal=causal, mask=mask, bias=bias, dropout=dropout)


def _added(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """A bool mask, or numbers that are added to the scores."""
    seen = None
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() not in (2, 3):
            raise ValueError(
                "mask must be bool, [B, S] or [B, T, S], True where a key may be seen; "
                f"got {mask.dtype} {mask.shape}"
            )
        seen = mask[:, None, None] if mask.dim() == 2 else mask[:, None]
    if causal:
        before = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        seen = before if seen is None else seen & before
    if bias is None:
        return seen
    bias = bias.to(q.dtype)
    return bias if seen is None else bias.masked_fill(~seen, -math.inf)


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
