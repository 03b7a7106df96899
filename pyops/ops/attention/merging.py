"""Attention over parts of the keys, merged into attention over all of them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(y: Tensor, lse: Tensor, other_y: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each.

        lse = log(exp(lse_a) + exp(lse_b)),    y = y_a + sigmoid(lse_b - lse_a) (y_b - y_a)

    Differentiable in all four. A row that saw nothing on one side takes the other's numbers bit
    for bit; one that saw nothing on both keeps y = 0 and lse = -inf. Dropped weights change
    nothing: lse is that before dropout. Liu et al., arXiv:2310.01889, keep numerator and
    denominator instead; this form overflows nowhere.

    Args:
        y: [B, T, H, K] of one part, as `attention_with_lse` gives it. What many parts are merged
            into is best kept in float32: the result has this dtype.
        lse: [B, H, T] of that part, float32, or float64.
        other_y: [B, T, H, K] of the other part.
        other_lse: [B, H, T] of the other part.

    Returns:
        (y, lse) of the union, in the dtypes of `y` and `lse`.

    Raises:
        ValueError: when the shapes don't fit.
    """
    B, T, H = y.shape[:3] if y.dim() == 4 else (0, 0, 0)
    if y.dim() != 4 or other_y.shape != y.shape or {lse.shape, other_lse.shape} != {(B, H, T)}:
        raise ValueError(
            "merge: need y and other_y of one shape [B, T, H, K], lse and other_lse [B, H, T]; got "
            f"{list(y.shape)}, {list(other_y.shape)}, {list(lse.shape)} and "
            f"{list(other_lse.shape)}"
        )
    none, other_none = lse == -torch.inf, other_lse == -torch.inf
    # Numbers that are safe to compute and to differentiate with stand in for -inf.
    a, b = lse.masked_fill(none, 0.0), other_lse.masked_fill(other_none, 0.0)
    share = (b - a).sigmoid().masked_fill(none, 1.0).masked_fill(other_none, 0.0)
    share = share.transpose(1, 2).unsqueeze(-1)
    mixed = torch.lerp(y.to(lse.dtype), other_y.to(lse.dtype), share).to(y.dtype)
    only, other_only = (t.transpose(1, 2).unsqueeze(-1) for t in (other_none, none))
    result = torch.where(only, y, torch.where(other_only, other_y.to(y.dtype), mixed))
    whole = torch.where(other_none, lse, torch.where(none, other_lse, torch.logaddexp(a, b)))
    return result, whole
