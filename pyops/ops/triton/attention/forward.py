"""Attention forward: a program has one tile of queries of one head, and goes over the tiles of keys
that it visits, ascending, with a softmax that is corrected as larger scores turn up
(FlashAttention-2: Dao, arXiv:2307.08691, algorithm 1)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.attention.problem import Problem
from pyops.ops.triton.attention.tiles import (
    add_product,
    kept_factor,
    places_of,
    row_visits,
    seen_pairs,
    tile_of,
    to_scores,
)
from pyops.ops.triton.launch import on_device

__all__ = ["attention_forward"]


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *operands: Tensor | None, **options: object
) -> tuple[Tensor, Tensor]:
    """y and lse."""
    problem = Problem(q, k, v, operands, options)
    B, T, H, _ = q.shape
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty((B, H, T), dtype=problem.wide)
    if y.numel():
        constants = problem.constants(backward=False)
        with on_device(q):
            _forward[(triton.cdiv(T, constants["M"]), B * H)](
                y,
                lse,
                *problem.arguments(rows=True, M=constants["M"], N=constants["N"]),
                **constants,
            )
    return y, lse


@triton.jit
def _walk(
    maximum, total, sum, q_tile, t, place_t, b, h, place, begin, end, tensors, numbers,
    WHOLE: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    EACH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Visits begin to end of a tile of queries."""
    k, v, key_places, lists = tensors
    k_t, v_t, K, scale, bounds, hides, adds, drops, soft_cap = numbers
    S = bounds[1]
    d = tl.arange(0, WIDTH)
    for n in range(begin, end):
        s0 = tile_of(n, lists, place, EACH) * N
        s = s0 + tl.arange(0, N)
        inside = s < S
        row = s.to(tl.int64)
        key = tl.load(
            k + row[None, :] * k_t + d[:, None],
            mask=inside[None, :] & (d < K)[:, None],
            other=0.0,
        )
        x = tl.dot(q_tile, key, input_precision=PRECISION, out_dtype=C) * scale
        place_s = places_of(key_places, s, S)[None, :]
        x, _slope = to_scores(x, t, s[None, :], place_t, place_s, b, h, bounds, adds, soft_cap, C)
        if WHOLE:
            seen = None
        else:
            seen = seen_pairs(t, s[None, :], place_t, place_s, b, bounds, hides)
            x = tl.where(seen, x, -float("inf"))
        now = tl.maximum(maximum, tl.max(x, axis=1))
        shift = tl.where(now == -float("inf"), 0.0, now)
        correction = tl.exp(maximum - shift)
        x = tl.exp(x - shift[:, None])
        total = total * correction + tl.sum(x, axis=1)
        if drops[0] is not None:
            x *= kept_factor(place_t, place_s, s0, b, h, drops, 1.0, False, C, M, N)
        value = tl.load(
            v + row[:, None] * v_t + d[None, :],
            mask=inside[:, None] & (d < K)[None, :],
            other=0.0,
        )
        sum = add_product(
            sum * correction[:, None], x.to(value.dtype), value, seen, WHOLE, PRECISION
        )
        maximum = now
    return maximum, total, sum


@triton.jit(do_not_specialize=["least", "scale_bits", "cap_bits", "keep_bits", "first"])
def _forward(
    y, lse, q, k, v, bias, distances, slopes, mask, query_documents, key_documents, query_places,
    key_places, counts, indices, state,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s,
    T, S, H, K, group, reach, before, after, list_b, list_h, most,
    first, row_stride, num_queries, num_keys, ordered, least, scale_bits, cap_bits, keep_bits,
    C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    OPAQUE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The last queries see most where causality holds: they come first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    bounds = (T, S, before, after)
    hides = (mask, query_documents, key_documents)
    adds = (bias, bias_b, bias_h, bias_t, bias_s, distances, reach, slopes)
    drops = (state, first, row_stride, num_queries, num_keys, least, ordered)
    lists = (counts, indices, most)
    EACH: tl.constexpr = LISTED // N if LISTED > 0 else 1
    place = b * list_b + h * list_h + (tile * M // LISTED if LISTED > 0 else tile)
    t0 = tile * M
    t, d = t0 + tl.arange(0, M), tl.arange(0, WIDTH)
    q_tile = tl.load(
        q + b * q_b + h * q_h + t.to(tl.int64)[:, None] * q_t + d[None, :],
        mask=(t < T)[:, None] & (d < K)[None, :],
        other=0.0,
    )
    place_t = places_of(query_places, t, T)[:, None]
    g = h // group
    tensors = (k + b * k_b + g * k_h, v + b * v_b + g * v_h, key_places, lists)
    numbers = (k_t, v_t, K, scale, bounds, hides, adds, drops, cap_bits if CAPPED else None)
    maximum = tl.full([M], -float("inf"), C)
    total, sum = tl.zeros([M], C), tl.zeros([M, WIDTH], C)
    cuts = row_visits(t0, place, bounds, lists, M, N, EACH, OPAQUE)
    for part in tl.static_range(1 if OPAQUE else 3):
        maximum, total, sum = _walk(
            maximum,
            total,
            sum,
            q_tile,
            t[:, None],
            place_t,
            b,
            h,
            place,
            cuts[part],
            cuts[part + 1],
            tensors,
            numbers,
            part == 1,
            C,
            M,
            N,
            WIDTH,
            EACH,
            PRECISION,
        )
    share = 1.0 / tl.where(total == 0.0, 1.0, total)
    if state is not None:
        share *= keep_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    at = (b * T + t.to(tl.int64)) * H + h
    tl.store(
        y + at[:, None] * K + d[None, :],
        (sum * share[:, None]).to(y.dtype.element_ty),
        mask=(t < T)[:, None] & (d < K)[None, :],
    )
    found = tl.where(total == 0.0, -float("inf"), maximum + tl.log(total))
    tl.store(lse + (b * H + h) * T + t, found, mask=t < T)
