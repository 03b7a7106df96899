"""Rotary positions: each pair of a head's first R elements is turned by its position's angle (Su et
al., arXiv:2104.09864).

    (a, b) -> (a cos - b sin, b cos + a sin)
    interleaved=False:  a = x[i], b = x[i + R/2]      (GPT-NeoX, Llama)
    interleaved=True:   a = x[2i], b = x[2i + 1]      (GPT-J)

cos and sin are fp32 tables [T, R/2], or [B, T, R/2] where each sequence has positions of its own.
Elements from R on pass through. Backward is the turn back: nothing but the tables is saved. They
get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyops.ops.layers.activation import FLOATS
from pyops.ops.library import define

__all__ = ["check", "rotary", "rotary_reference"]


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """x [B, T, H, K] of any strides, turned: a contiguous tensor of its shape and dtype.

    Moves 2 elements forward and 2 backward for each of x. Computed in fp32 (float64 for float64 x),
    rounded once.

    Args:
        cos, sin: fp32 [T, R/2] or [B, T, R/2], R <= K.

    Raises:
        ValueError: when the shapes don't fit.
    """
    check(x, cos, sin)
    result: Tensor = torch.ops.pyops.rotary.default(
        x, cos, sin, interleaved=interleaved, inverse=False
    )
    return result


def check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError unless the operands of `rotary` fit each other."""
    if x.dim() != 4 or x.dtype not in FLOATS:
        raise ValueError(
            "rotary: x must be [B, T, H, K] of float32, bfloat16, float16 or float64; "
            f"got {list(x.shape)} {x.dtype}"
        )
    B, T, _, K = x.shape
    fits = (
        cos.dim() in (2, 3)
        and tuple(cos.shape[:-1]) == ((T,) if cos.dim() == 2 else (B, T))
        and 2 * cos.shape[-1] <= K
    )
    if (
        not fits
        or cos.shape != sin.shape
        or cos.dtype != torch.float32
        or sin.dtype != torch.float32
    ):
        raise ValueError(
            f"rotary: cos and sin must be float32 [{T}, R/2] or [{B}, {T}, R/2] with R "
            f"<= {K}; got {list(cos.shape)} "
            f"{cos.dtype} and {list(sin.shape)} {sin.dtype}"
        )


def rotary_reference(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool
) -> Tensor:
    """The meaning of `rotary` in plain torch, without its derivative; `inverse` turns back."""
    check(x, cos, sin)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table.to(dtype).unsqueeze(-2) for table in (cos, -sin if inverse else sin))
    half = cos.shape[-1]
    turned, rest = x.detach()[..., : 2 * half].to(dtype), x.detach()[..., 2 * half :]
    a, b = (
        (turned[..., 0::2], turned[..., 1::2])
        if interleaved
        else (turned[..., :half], turned[..., half:])
    )
    pair = [a * c - b * s, b * c + a * s]
    y = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([y.to(x.dtype), rest], dim=-1).contiguous()


def _fake(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    ctx.save_for_backward(*inputs[1:])
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
    cos, sin = ctx.saved_tensors
    back = {"interleaved": ctx.options["interleaved"], "inverse": not ctx.options["inverse"]}
    return torch.ops.pyops.rotary.default(dy, cos, sin, **back), None, None


define(
    "rotary(Tensor x, Tensor cos, Tensor sin, *, bool interleaved, bool inverse) -> Tensor",
    reference=rotary_reference,
    fake=_fake,
    backward=_backward,
    setup_context=_save,
    triton="rotary",
)
