"""rotary for CUDA: a program turns some heads of one token, so that the token's angles are loaded
once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.layers.rotary import check
from pyops.ops.triton.launch import computed_in, on_device, tile

__all__ = ["rotary"]

HEADS = 16  # of a tile: 8 numbers a thread for each half of heads of 128


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, inverse: bool) -> Tensor:
    """Pairs of x [B, T, H, K] turned, or turned back."""
    check(x, cos, sin)
    B, T, H, K = x.shape
    out = x.new_empty(x.shape)
    if not x.numel():
        return out
    cos, sin, half = cos.contiguous(), sin.contiguous(), cos.shape[-1]
    heads = tile(H, most=HEADS)
    with on_device(x):
        _rotary[(B * T, triton.cdiv(H, heads))](
            x,
            cos,
            sin,
            out,
            *x.stride(),
            T,
            H,
            K,
            half,
            T * half if cos.dim() == 3 else 0,
            C=computed_in(x),
            HEADS=heads,
            PAIRS=tile(half, most=1 << 16),
            REST=tile(K - 2 * half, most=1 << 16),
            HAS_REST=bool(K - 2 * half),
            NEXT=int(interleaved),
            INVERSE=inverse,
        )
    return out


@triton.jit
def _rotary(
    x,
    cos,
    sin,
    out,
    stride_b,
    stride_t,
    stride_h,
    stride_k,
    T,
    H,
    K,
    half,
    table_stride,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    HAS_REST: tl.constexpr,
    NEXT: tl.constexpr,
    INVERSE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    b, t = token // T, token % T
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    source = x + b * stride_b + t * stride_t + head[:, None].to(tl.int64) * stride_h
    target = out + (token * H + head[:, None]) * K
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + b * table_stride + t * half + pair, mask=pair < half, other=0.0).to(C)[
        None, :
    ]
    s = tl.load(sin + b * table_stride + t * half + pair, mask=pair < half, other=0.0).to(C)[
        None, :
    ]
    if INVERSE:
        s = -s
    valid = (head < H)[:, None]
    # the partner is the next element: loaded as they lie, in whole accesses, and split in registers
    if NEXT:
        k = tl.arange(0, 2 * PAIRS)
        inside = valid & (k < 2 * half)[None, :]
        both = tl.load(source + k[None, :] * stride_k, mask=inside, other=0.0).to(C)
        a, z = tl.split(tl.reshape(both, [HEADS, PAIRS, 2]))
        turned = tl.reshape(tl.join(a * c - z * s, z * c + a * s), [HEADS, 2 * PAIRS])
        tl.store(target + k[None, :], turned.to(out.dtype.element_ty), mask=inside)
    else:  # it is `half` further on
        inside = valid & (pair < half)[None, :]
        a = tl.load(source + pair[None, :] * stride_k, mask=inside, other=0.0).to(C)
        z = tl.load(source + (pair + half)[None, :] * stride_k, mask=inside, other=0.0).to(C)
        tl.store(target + pair[None, :], (a * c - z * s).to(out.dtype.element_ty), mask=inside)
        tl.store(
            target + (pair + half)[None, :], (z * c + a * s).to(out.dtype.element_ty), mask=inside
        )
    if HAS_REST:
        k = 2 * half + tl.arange(0, REST)
        there = (head < H)[:, None] & (k < K)[None, :]
        tl.store(
            target + k[None, :],
            tl.load(source + k[None, :] * stride_k, mask=there, other=0.0),
            mask=there,
        )
