"""Gradients of a bias and of a table by distance: a program has a tile of keys, and goes over the
rows, heads and queries that share its part of the bias, so that no two programs add to a number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyops.ops.triton.attention.problem import Problem
from pyops.ops.triton.attention.tiles import (
    column_visits,
    places_of,
    score_gradient,
    seen_pairs,
    tile_of,
)
from pyops.ops.triton.launch import dense, on_device

__all__ = ["bias_gradients"]


def bias_gradients(
    problem: Problem, dy: Tensor, lse: Tensor, delta: Tensor, *, bias: bool, table: bool
) -> tuple[Tensor, Tensor]:
    """dbias of the bias's shape and dtype and dtable of the table's, each [0] where it is not
    wanted."""
    q, k, given, wide = problem.q, problem.k, problem.tensors, problem.wide
    B, _, H, _ = q.shape
    dbias = dtable = partial = None
    rows = heads = 1
    if bias and given.bias is not None:
        dbias = torch.zeros(given.bias.shape, dtype=wide, device=q.device)
        rows, heads = B // dbias.shape[0], H // dbias.shape[1]
    constants = problem.constants(backward=True)
    tiles = triton.cdiv(k.shape[1], constants["N"])
    if table and given.table is not None:
        partial = torch.zeros((B, tiles, H, len(given.table)), dtype=wide, device=q.device)
    if q.numel() and k.numel() and (dbias is not None or partial is not None):
        with on_device(q):
            _gradients[(tiles, (B // rows) * (H // heads))](
                dbias,
                partial,
                dense(given.buckets) if partial is not None else None,
                rows,
                heads,
                1 if given.table is None else len(given.table),
                dy,
                lse,
                delta,
                *dy.stride()[:3],
                *problem.arguments(rows=False, M=constants["M"], N=constants["N"]),
                BUCKETS=triton.next_power_of_2(1 if partial is None else partial.shape[3]),
                BY_QUERY=dbias is not None and dbias.shape[2] > 1,
                **constants,
            )
    if partial is not None:
        dtable = partial.sum((0, 1), dtype=torch.float64).t().to(wide).contiguous()
    if dbias is not None and given.bias is not None:
        dbias = dbias.to(given.bias.dtype)
    return (
        q.new_empty(0) if dbias is None else dbias,
        q.new_empty(0, dtype=wide) if dtable is None else dtable,
    )


@triton.jit
def _add_to_buckets(sums, ds, seen, away, buckets, reach, BUCKETS: tl.constexpr):
    """Sums of a tile by the bucket of its distance; far from the diagonal all pairs share one."""
    bucket = tl.load(buckets + tl.minimum(tl.maximum(away, -reach), reach) + reach)
    lane = tl.arange(0, BUCKETS)
    low = tl.min(tl.min(tl.where(seen, bucket, BUCKETS), axis=1), axis=0)
    high = tl.max(tl.max(tl.where(seen, bucket, -1), axis=1), axis=0)
    for i in range(low, high + 1):
        found = tl.sum(tl.sum(tl.where(bucket == i, ds, 0.0), axis=1), axis=0)
        sums = tl.where(lane == i, sums + found, sums)
    return sums


@triton.jit
def _over_queries(
    sums, by_key, key, value, s, s0, b, h, place, part, tensors, numbers, keep,
    BUCKETS: tl.constexpr, BY_QUERY: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, OPAQUE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What the queries of a head add for a tile of keys: to `sums` by bucket, and to dbias in
    memory (BY_QUERY) or `by_key`."""
    q, dy, lse, delta, query_places, key_places, lists, dbias, buckets = tensors
    q_t, dy_t, K, scale, bounds, hides, adds, drops, cap = numbers
    T, S, reach = bounds[0], bounds[1], adds[6]
    d, column = tl.arange(0, WIDTH), s[None, :]
    place_s = places_of(key_places, s, S)[None, :]
    lo, _whole, _rest, hi = column_visits(s0, place, bounds, lists, M, N, EACH, OPAQUE)
    for n in range(lo, hi):
        t = (tile_of(n, lists, place, EACH) * M + tl.arange(0, M))[:, None]
        row, inside = t.to(tl.int64), (t < T) & (d < K)[None, :]
        q_tile = tl.load(q + row * q_t + d[None, :], mask=inside, other=0.0)
        dy_tile = tl.load(dy + row * dy_t + d[None, :], mask=inside, other=0.0)
        norm = tl.load(lse + t, mask=t < T, other=float("inf"))
        shift = tl.load(delta + t, mask=t < T, other=0.0)
        place_t = places_of(query_places, t, T)
        x = tl.dot(q_tile, tl.trans(key), input_precision=PRECISION, out_dtype=C) * scale
        dp = tl.dot(dy_tile, tl.trans(value), input_precision=PRECISION, out_dtype=C)
        seen = seen_pairs(t, column, place_t, place_s, b, bounds, hides)
        _kept, ds, _slope = score_gradient(
            x,
            dp,
            norm,
            shift,
            seen,
            t,
            column,
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
            False,
            False,
            C,
            M,
            N,
        )
        if buckets is not None:
            sums = _add_to_buckets(sums, ds, seen, place_s - place_t, buckets, reach, BUCKETS)
        if BY_QUERY:
            at = dbias + (part * T + row) * S + column
            valid = (t < T) & (column < S)
            tl.store(at, tl.load(at, mask=valid, other=0.0) + ds, mask=valid)
            tl.debug_barrier()  # before other threads may add to the same numbers
        else:
            by_key += tl.sum(ds, axis=0)
    return sums, by_key


@triton.jit(do_not_specialize=["least", "scale_bits", "cap_bits", "keep_bits", "first"])
def _gradients(
    dbias, partial, buckets, rows, heads, num_buckets, dy, lse, delta, dy_b, dy_t, dy_h,
    q, k, v, bias, distances, slopes, mask, query_documents, key_documents, query_places,
    key_places, counts, indices, state,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, bias_b, bias_h, bias_t, bias_s,
    T, S, H, K, group, reach, before, after, list_b, list_h, most,
    first, row_stride, num_queries, num_keys, ordered, least, scale_bits, cap_bits, keep_bits,
    BUCKETS: tl.constexpr, BY_QUERY: tl.constexpr,
    C: tl.constexpr, M: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr,
    OPAQUE: tl.constexpr, LISTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, parts = tl.program_id(0), H // heads
    b0 = (tl.program_id(1) // parts).to(tl.int64) * rows
    h0 = (tl.program_id(1) % parts).to(tl.int64) * heads
    scale = scale_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    keep = keep_bits.to(tl.int64).to(tl.float64, bitcast=True).to(C)
    bounds = (T, S, before, after)
    hides = (mask, query_documents, key_documents)
    adds = (bias, bias_b, bias_h, bias_t, bias_s, distances, reach, slopes)
    drops = (state, first, row_stride, num_queries, num_keys, least, ordered)
    lists = (counts, indices, most)
    EACH: tl.constexpr = LISTED // M if LISTED > 0 else 1
    numbers = (q_t, dy_t, K, scale, bounds, hides, adds, drops, cap_bits if CAPPED else None)
    s0 = tile * N
    s, d = s0 + tl.arange(0, N), tl.arange(0, WIDTH)
    row, inside = s.to(tl.int64)[:, None], (s < S)[:, None] & (d < K)[None, :]
    part = tl.program_id(1).to(tl.int64)
    by_key = tl.zeros([N], C)
    for member in range(0, rows * heads):
        b, h = b0 + member // heads, h0 + member % heads
        g = h // group
        key = tl.load(k + b * k_b + g * k_h + row * k_t + d[None, :], mask=inside, other=0.0)
        value = tl.load(v + b * v_b + g * v_h + row * v_t + d[None, :], mask=inside, other=0.0)
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
            dbias,
            buckets,
        )
        sums, by_key = _over_queries(
            tl.zeros([BUCKETS], C),
            by_key,
            key,
            value,
            s,
            s0,
            b,
            h,
            place,
            part,
            tensors,
            numbers,
            keep,
            BUCKETS,
            BY_QUERY,
            C,
            M,
            N,
            WIDTH,
            EACH,
            OPAQUE,
            PRECISION,
        )
        if partial is not None:
            lane = tl.arange(0, BUCKETS)
            into = ((b * tl.num_programs(0) + tile) * H + h) * num_buckets
            tl.store(partial + into + lane, sums, mask=lane < num_buckets)
    if dbias is not None and not BY_QUERY:
        tl.store(dbias + part * S + s, by_key, mask=s < S)
