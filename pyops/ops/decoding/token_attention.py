"""Attention of one new token for each row over what is kept of the tokens before it: rotary
positions, keys and values put in their places, and softmax, in one call.

    k, v of the token  -->  keys[row, group, place], values[row, group, place]
    y[row, head] = sum over n <= place of softmax(scale q . keys[row, group, n])[n]
                                          values[row, group, n]

For fp32 without gradients. A row sees its own tokens up to its place, so that rows of different
lengths need no mask. On the CPU a row's bits depend neither on the other rows nor on threads. On
CUDA it is plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.layers.rotary import rotary_reference
from pyops.ops.library import by_torch_on_cuda, define

__all__ = ["token_attention_", "token_attention_reference"]


def token_attention_(
    heads: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    places: Tensor,
    turns: tuple[Tensor, Tensor] | None = None,
    *,
    first_row: int = 0,
    scale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    """Keep the keys and values of new tokens, and attend to what is kept -> [R, H K].

    Args:
        heads: q fp32 [R, 1, H, K], k and v [R, 1, G, K], of the new token of each row; H is a
            multiple of G.
        kept: Keys and values [rows, G, S, K], contiguous; those of the new tokens are put there,
            the keys turned.
        places: int64 of R numbers below S: where each row's token stands.
        turns: cos and sin of these places, fp32 [R, 1, K/2 or less] each, by which q and k are
            turned; None: they are not.
        first_row: Of keys and values, to which the first row of q belongs.
        scale: Factor of the scores.
        interleaved: As of `rotary`.

    Raises:
        RuntimeError: For operands that don't fit.
    """
    cos, sin = (None, None) if turns is None else turns
    y: Tensor = torch.ops.pyops.token_attention_.default(
        *heads,
        *kept,
        places,
        cos,
        sin,
        first_row=first_row,
        scale=scale,
        interleaved=interleaved,
    )
    return y


def token_attention_reference(
    *operands: Any, first_row: int, scale: float, interleaved: bool
) -> Tensor:
    """The op in plain torch. `operands`: q, k, v, keys, values, places, cos, sin."""
    q, k, v, keys, values, places, cos, sin = operands
    if cos is not None:
        q, k = (
            rotary_reference(x, cos, sin, interleaved=interleaved, inverse=False) for x in (q, k)
        )
    rows, heads = q.shape[0], q.shape[2]
    places_R = places.flatten()
    row_R = torch.arange(first_row, first_row + rows, device=q.device)
    for kept, new in ((keys, k), (values, v)):
        kept[row_R, :, places_R] = new[:, 0]
    own = slice(first_row, first_row + rows)
    each = heads // keys.shape[1]
    keys_RHSK, values_RHSK = (x[own].repeat_interleave(each, 1) for x in (keys, values))
    scores_RHS = scale * (keys_RHSK @ q[:, 0].unsqueeze(-1)).squeeze(-1)
    seen_RS = torch.arange(keys.shape[2], device=q.device) <= places_R[:, None]
    weights_RHS = scores_RHS.masked_fill(~seen_RS[:, None], -torch.inf).softmax(-1)
    seen_values = values_RHSK.masked_fill(~seen_RS[:, None, :, None], 0.0)
    y: Tensor = (weights_RHS.unsqueeze(-2) @ seen_values).reshape(rows, -1)
    return y


def _fake(q: Tensor, *_: object, **__: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2] * q.shape[3])


define(
    "token_attention_(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, "
    "Tensor places, Tensor? cos, Tensor? sin, *, int first_row, float scale, bool interleaved) "
    "-> Tensor",
    reference=token_attention_reference,
    fake=_fake,
)
by_torch_on_cuda("token_attention_", token_attention_reference)
