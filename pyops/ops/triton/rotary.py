"""rotary for CUDA: a program turns some heads of one token, so that the token's angles are loaded once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.rotary import check
from pyops.ops.triton.launch import computed_in, on_device, tile

__all__ = ["rotary"]

HEADS = 8  # of a tile


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """Pairs of x [B, T, H, K] turned, or turned back."""
    check(x, cos, sin)
    B, T, H, K = x.shape
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    with on_device(x):
        _rotary[(B * T, triton.cdiv(H, HEADS))](
            x, cos, sin, out, *x.stride(), T, H, K, half, T * half if cos.dim() == 3 else 0, C=computed_in(x), HEADS=HEADS,
            PAIRS=tile(half, most=1 << 16), REST=tile(K - 2 * half, most=1 << 16), HAS_REST=bool(K - 2 * half),
            NEXT=int(interleaved), INVERSE=inverse,
        )  # fmt: skip
    return out


@triton.jit
def _rotary(x, cos, sin, out, stride_b, stride_t, stride_h, stride_k, T, H, K, half, table_stride, C: tl.constexpr,
            HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HAS_REST: tl.constexpr, NEXT: tl.constexpr,
            INVERSE: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x + b * stride_b + t * stride_t + head[:, None].to(tl.int64) * stride_h
    target = out + (token * H + head[:, None]) * K
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + b * table_stride + t * half + pair, mask=pair < half, other=0.0).to(C)[None, :]
    s = tl.load(sin + b * table_stride + t * half + pair, mask=pair < half, other=0.0).to(C)[None, :]
    if INVERSE:
        s = -s
    inside = (head < H)[:, None] & (pair < half)[None, :]
    first = pair * (1 + NEXT)  # NEXT: the partner is the next element, else `half` further on
    second = first + (1 if NEXT else half)
    a = tl.load(source + first[None, :] * stride_k, mask=inside, other=0.0).to(C)
    z = tl.load(source + second[None, :] * stride_k, mask=inside, other=0.0).to(C)
    tl.store(target + first[None, :], (a * c - z * s).to(out.dtype.element_ty), mask=inside)
    tl.store(target + second[None, :], (z * c + a * s).to(out.dtype.element_ty), mask=inside)
    if HAS_REST:
        k = 2 * half + tl.arange(0, REST)
        there = (head < H)[:, None] & (k < K)[None, :]
        tl.store(target + k[None, :], tl.load(source + k[None, :] * stride_k, mask=there, other=0.0), mask=there)
