"""Attention backward: dk and dv by tiles of keys, dq by tiles of queries. Scores are made again in
each, from lse: seven products, and no sum that two programs add to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.attention.biases import bias_gradients
from pyops.ops.triton.attention.problem import Problem, unit_stride
from pyops.ops.triton.attention.tiles import (
    add_product,
    column_visits,
    places_of,
    row_visits,
    score_gradient,
    seen_pairs,
    tile_of,
)
from pyops.ops.triton.launch import on_device

__all__ = ["attention_backward"]


def attention_backward(
    dy: Tensor,
    dlse: Tensor | None,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *operands: Tensor | None,
    bias_grad: bool,
    table_grad: bool,
    **options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and dbias and dtable or [0]."""
    problem = Problem(q, k, v, operands, options)
    B, T, H, _ = q.shape
    S, G = k.shape[1], k.shape[2]
    _check_results(q, problem.wide, dy, y, lse, dlse)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    dy, lse = unit_stride(dy), lse.contiguous()
    delta = _delta(dy, y, dlse, problem.wide)
    constants = problem.constants(backward=True)
    M, N = constants["M"], constants["N"]
    if y.numel() and k.numel():
        saved = (dy, lse, delta, *dy.stride()[:3])
        with on_device(q):
            _keys_gradient[(triton.cdiv(S, N), B * G)](
                dk, dv, *saved, *problem.arguments(rows=False, M=M, N=N), **constants
            )
            _queries_gradient[(triton.cdiv(T, M), B * H)](
                dq, *saved, *problem.arguments(rows=True, M=M, N=N), **constants
            )
    dbias, dtable = bias_gradients(problem, dy, lse, delta, bias=bias_grad, table=table_grad)
    return dq, dk, dv, dbias, dtable


def _check_results(
    q: Tensor, wide: torch.dtype, dy: Tensor, y: Tensor, lse: Tensor, dlse: Tensor | None
) -> None:
    B, T, H, _ = q.shape
    rows = [lse] if dlse is None else [lse, dlse]
    if any(x.shape != q.shape or x.dtype != q.dtype for x in (dy, y)) or any(
        x.shape != (B, H, T) or x.dtype != wide for x in rows
    ):
        raise ValueError(
            f"attention_backward: dy and y must be as q, lse and dlse {wide} [{B}, {H}, {T}]; got "
            f"{list(dy.shape)}, {list(y.shape)}, {list(lse.shape)}"
        )


def _delta(dy: Tensor, y: Tensor, dlse: Tensor | None, wide: torch.dtype) -> Tensor:
    """wide [B, H, T]: sum of dy y, less the gradient of lse."""
    B, T, H, K = y.shape
    delta = y.new_empty((B, H, T), dtype=wide)
    if y.numel():
        with on_device(y):
            _sum_products[(triton.cdiv(T, ROWS), B * H)](
                dy,
                y.contiguous(),
                None if dlse is None else dlse.contiguous(),
                delta,
                *dy.stride()[:3],
                T,
                H,
                K,
                C=tl.float64 if wide == torch.float64 else tl.float32,
                ROWS=ROWS,
                WIDTH=triton.next_power_of_2(K),
            )
    return delta


ROWS = 32  # of a tile of the sum


@triton.jit
def _sum_products(
    dy, y, dlse, delta, dy_b, dy_t, dy_h, T, H, K,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (t < T)[:, None] & (d < K)[None, :]
    row = t.to(tl.int64)
    a = tl.load(
        dy + b * dy_b + h * dy_h + row[:, None] * dy_t + d[None, :], mask=inside, other=0.0
    ).to(C)
    c = tl.load(y + ((b * T + row) * H + h)[:, None] * K + d[None, :], mask=inside, other=0.0).to(C)
    sum = tl.sum(a * c, axis=1)
    at = (b * H + h) * T + t
    if dlse is not None:
        sum -= tl.load(dlse + at, mask=t < T, other=0.0)
    tl.store(delta + at, sum, mask=t < T)


@triton.jit
def _walk_queries(
    dk, dv, key, value, s, s0, b, h, place, begin, end, tensors, numbers, keep,
    WHOLE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    EACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Visits begin to end of a tile of keys; tiles are turned, [N, M]."""
    q, dy, lse, delta, query_places, key_places, lists = tensors
    q_t, dy_t, K, scale, bounds, hides, adds, drops, cap = numbers
    T, S = bounds[0], bounds[1]
    d = tl.arange(0, WIDTH)
    place_s = places_of(key_places, s, S)[:, None]
    for n in range(begin, end):
        t = tile_of(n, lists, place, EACH) * M + tl.arange(0, M)
        row = t.to(tl.int64)
        inside = (t < T)[:, None] & (d < K)[None, :]
        q_tile = tl.load(q + row[:, None] * q_t + d[None, :], mask=inside, other=0.0)
        dy_tile = tl.load(dy + row[:, None] * dy_t + d[None, :], mask=inside, other=0.0)
        norm = tl.load(lse + t, mask=t < T, other=float("inf"))
        shift = tl.load(delta + t, mask=t < T, other=0.0)
        place_t = places_of(query_places, t, T)[None, :]
        x = tl.dot(key, tl.trans(q_tile), input_precision=PRECISION, out_dtype=C) * scale
        dp = tl.dot(value, tl.trans(dy_tile), input_precision=PRECISION, out_dtype=C)
        if WHOLE:
            seen = None
        else:
            seen = seen_pairs(t[None, :], s[:, None], place_t, place_s, b, bounds, hides)
        kept, ds, slope = score_gradient(
            x,
            dp,
            norm[None, :],
            shift[None, :],
            seen,
            t[None, :],
            s[:, None],
            place_t,
            place_s,
            s0,
            b,
            h,
            bounds,
            adds,
            drops,
            cap,
            keep,
            WHOLE,
            True,
            C,
            M,
            N,
        )
        dv = add_product(dv, kept.to(dy_tile.dtype), dy_tile, seen, WHOLE, PRECISION)
        dk = add_product(dk, (ds * slope).to(q_tile.dtype), q_tile, seen, WHOLE, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["least", "scale_bits", "cap_bits", "keep_bits", "first"])
def _keys_gradient(
    dk, dv, dy, lse, delta, dy_b, dy_t, dy_h,
    q, k, v, bias, distances, slopes, mask, query_documents, key_documents, query_places,
    key_places, counts, indices, state,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s,
    T, S, H, K, group, reach, before, after, list_b, list_h, most,
    first, row_stride, num_queries, num_keys, ordered, least, scale_bits, cap_bits, keep_bits,
    C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    OPAQUE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, G = tl.program_id(0), H // group
    b, g = (tl.program_id(1) // G).to(tl.int64), (tl.program_id(1) % G).to(tl.int64)
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    keep = keep_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    bounds = (T, S, before, after)
    hides = (mask, query_documents, key_documents)
    adds = (bias, bias_b, bias_h, bias_t, bias_s, distances, reach, slopes)
    drops = (state, first, row_stride, num_queries, num_keys, least, ordered)
    lists = (counts, indices, most)
    numbers = (q_t, dy_t, K, scale, bounds, hides, adds, drops, cap_bits if CAPPED else None)
    EACH: tl.constexpr = LISTED // M if LISTED > 0 else 1
    s0 = tile * N
    s, d = s0 + tl.arange(0, N), tl.arange(0, WIDTH)
    inside, row = (s < S)[:, None] & (d < K)[None, :], s.to(tl.int64)[:, None]
    key = tl.load(k + b * k_b + g * k_h + row * k_t + d[None, :], mask=inside, other=0.0)
    value = tl.load(v + b * v_b + g * v_h + row * v_t + d[None, :], mask=inside, other=0.0)
    dk_sum, dv_sum = tl.zeros([N, WIDTH], C), tl.zeros([N, WIDTH], C)
    for member in range(0, group):
        h = g * group + member
        place = b * list_b + h * list_h + (tile * N // LISTED if LISTED > 0 else tile)
        line = (b * H + h) * T
        tensors = (
            q + b * q_b + h * q_h,
            dy + b * dy_b + h * dy_h,
            lse + line,
            delta + line,
            query_places,
            key_places,
            lists,
        )
        cuts = column_visits(s0, place, bounds, lists, M, N, EACH, OPAQUE)
        for part in tl.static_range(1 if OPAQUE else 3):
            dk_sum, dv_sum = _walk_queries(
                dk_sum,
                dv_sum,
                key,
                value,
                s,
                s0,
                b,
                h,
                place,
                cuts[part],
                cuts[part + 1],
                tensors,
                numbers,
                keep,
                part == 1,
                C,
                M,
                N,
                WIDTH,
                EACH,
                PRECISION,
            )
    at = ((b * S + row) * (H // group) + g) * K + d[None, :]
    tl.store(dk + at, (dk_sum * scale).to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + at, dv_sum.to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _walk_keys(
    dq, q_tile, dy_tile, norm, shift, t, place_t, b, h, place, begin, end, tensors, numbers, keep,
    WHOLE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    EACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Visits begin to end of a tile of queries."""
    k, v, key_places, lists = tensors
    k_t, v_t, K, scale, bounds, hides, adds, drops, cap = numbers
    S = bounds[1]
    d = tl.arange(0, WIDTH)
    for n in range(begin, end):
        s0 = tile_of(n, lists, place, EACH) * N
        s = s0 + tl.arange(0, N)
        row = s.to(tl.int64)[:, None]
        inside = (s < S)[:, None] & (d < K)[None, :]
        key = tl.load(k + row * k_t + d[None, :], mask=inside, other=0.0)
        value = tl.load(v + row * v_t + d[None, :], mask=inside, other=0.0)
        place_s = places_of(key_places, s, S)[None, :]
        x = tl.dot(q_tile, tl.trans(key), input_precision=PRECISION, out_dtype=C) * scale
        dp = tl.dot(dy_tile, tl.trans(value), input_precision=PRECISION, out_dtype=C)
        seen = None if WHOLE else seen_pairs(t, s[None, :], place_t, place_s, b, bounds, hides)
        _kept, ds, slope = score_gradient(
            x,
            dp,
            norm,
            shift,
            seen,
            t,
            s[None, :],
            place_t,
            place_s,
            s0,
            b,
            h,
            bounds,
            adds,
            drops,
            cap,
            keep,
            WHOLE,
            False,
            C,
            M,
            N,
        )
        dq = add_product(dq, (ds * slope).to(key.dtype), key, seen, WHOLE, PRECISION)
    return dq


@triton.jit(do_not_specialize=["least", "scale_bits", "cap_bits", "keep_bits", "first"])
def _queries_gradient(
    dq, dy, lse, delta, dy_b, dy_t, dy_h,
    q, k, v, bias, distances, slopes, mask, query_documents, key_documents, query_places,
    key_places, counts, indices, state,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s,
    T, S, H, K, group, reach, before, after, list_b, list_h, most,
    first, row_stride, num_queries, num_keys, ordered, least, scale_bits, cap_bits, keep_bits,
    C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    OPAQUE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    keep = keep_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    bounds = (T, S, before, after)
    hides = (mask, query_documents, key_documents)
    adds = (bias, bias_b, bias_h, bias_t, bias_s, distances, reach, slopes)
    drops = (state, first, row_stride, num_queries, num_keys, least, ordered)
    lists = (counts, indices, most)
    numbers = (k_t, v_t, K, scale, bounds, hides, adds, drops, cap_bits if CAPPED else None)
    EACH: tl.constexpr = LISTED // N if LISTED > 0 else 1
    place = b * list_b + h * list_h + (tile * M // LISTED if LISTED > 0 else tile)
    t0 = tile * M
    t, d = t0 + tl.arange(0, M), tl.arange(0, WIDTH)
    inside, row = (t < T)[:, None] & (d < K)[None, :], t.to(tl.int64)[:, None]
    q_tile = tl.load(q + b * q_b + h * q_h + row * q_t + d[None, :], mask=inside, other=0.0)
    dy_tile = tl.load(dy + b * dy_b + h * dy_h + row * dy_t + d[None, :], mask=inside, other=0.0)
    line = (b * H + h) * T
    norm = tl.load(lse + line + t, mask=t < T, other=float("inf"))[:, None]
    shift = tl.load(delta + line + t, mask=t < T, other=0.0)[:, None]
    place_t = places_of(query_places, t, T)[:, None]
    g = h // group
    tensors = (k + b * k_b + g * k_h, v + b * v_b + g * v_h, key_places, lists)
    sum = tl.zeros([M, WIDTH], C)
    cuts = row_visits(t0, place, bounds, lists, M, N, EACH, OPAQUE)
    for part in tl.static_range(1 if OPAQUE else 3):
        sum = _walk_keys(
            sum,
            q_tile,
            dy_tile,
            norm,
            shift,
            t[:, None],
            place_t,
            b,
            h,
            place,
            cuts[part],
            cuts[part + 1],
            tensors,
            numbers,
            keep,
            part == 1,
            C,
            M,
            N,
            WIDTH,
            EACH,
            PRECISION,
        )
    at = ((b * T + row) * H + h) * K + d[None, :]
    tl.store(dq + at, (sum * scale).to(dq.dtype.element_ty), mask=inside)
