"""What the kernels of attention do with one tile of scores: which pairs see each other, what is
added, which weights are kept; and how a program finds the tiles it visits.

    places        int32, shaped to broadcast over a tile either way up: [M, 1] and [1, N], or
                  [1, M] and [N, 1] where a tile is turned
    visits        lo .. a .. b .. hi: in [a, b) every pair of a tile sees each other, and neither
                  masks nor what is not finite need a look; where any pair may be hidden, lo .. a
                  are all
"""

from __future__ import annotations

import triton
import triton.language as tl

from pyops.ops.triton.dropout import _words

__all__ = [
    "add_product",
    "column_visits",
    "kept_factor",
    "places_of",
    "row_visits",
    "score_gradient",
    "seen_pairs",
    "tile_of",
    "to_scores",
]


@triton.jit
def places_of(places, at, n):
    """The places of tokens `at`, int32."""
    if places is not None:
        at = tl.load(places + at, mask=at < n, other=0).to(tl.int32)
    return at


@triton.jit
def seen_pairs(t, s, place_t, place_s, b, bounds, hides):
    """Which pairs of a tile see each other."""
    T, S, before, after = bounds
    mask, query_documents, key_documents = hides
    seen = (t < T) & (s < S)
    if after is not None:
        seen = seen & (place_s - place_t <= after)
    if before is not None:
        seen = seen & (place_t - place_s <= before)
    if mask is not None:
        seen = seen & (tl.load(mask + b * S + s, mask=s < S, other=0) != 0)
    if query_documents is not None:
        own = tl.load(query_documents + b * T + t, mask=t < T, other=-1)
        other = tl.load(key_documents + b * S + s, mask=s < S, other=-2)
        seen = seen & (own == other) & (own >= 0)
    return seen


@triton.jit
def _tanh(u):
    """And its slope; near 0 a Taylor polynomial, as in csrc/math/attention/attention.h."""
    a, z = tl.abs(u), u * u
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    far = tl.where(u < 0.0, -far, far)
    p = -8.8632355e-3 * z + 2.1869489e-2
    p = p * z - 5.3968254e-2
    p = p * z + 1.3333333e-1
    p = p * z - 3.3333333e-1
    # The polynomial is one of fp32
    value = far if u.dtype == tl.float64 else tl.where(a < 0.25, u * z * p + u, far)
    return value, 1.0 - value * value


@triton.jit
def to_scores(x, t, s, place_t, place_s, b, h, bounds, adds, soft_cap, C: tl.constexpr):
    """Scores of products, and the derivative of the soft cap, 1 where there is none."""
    T, S, _, _ = bounds
    bias, bias_b, bias_h, bias_t, bias_s, distances, reach, slopes = adds
    slope = tl.full([1, 1], 1.0, C)
    if soft_cap is not None:
        cap = soft_cap.to(tl.int64).to(tl.float64, bitcast=True).to(C)
        bent, slope = _tanh(x / cap)
        x = cap * bent
    if bias is not None:
        at = bias + b * bias_b + h * bias_h + t.to(tl.int64) * bias_t + s.to(tl.int64) * bias_s
        x += tl.load(at, mask=(t < T) & (s < S), other=0.0).to(C)
    if distances is not None:
        away = tl.minimum(tl.maximum(place_s - place_t, -reach), reach) + reach
        x += tl.load(distances + h * (2 * reach + 1) + away)
    if slopes is not None:
        x -= tl.load(slopes + h) * tl.abs(place_s - place_t).to(C)
    return x, slope


@triton.jit
def kept_factor(
    place_t, place_s, s0, b, h, drops, scale, TURNED: tl.constexpr, C: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`scale` where a weight is kept, else 0.

    ordered: keys lie one after the other from s0 on, and the counters of all rows are as far from a
    multiple of four, so that four weights share a block of the stream.
    """
    state, first, row_stride, num_queries, num_keys, least, ordered = drops
    key = tl.load(state)
    start = tl.load(state + 1) + first + b * row_stride
    if ordered is not None:
        rows = tl.reshape(place_t, [M, 1]).to(tl.int64)
        index = start + (h * num_queries + rows) * num_keys + s0
        skip = start & 3
        block = (index >> 2) + tl.arange(0, N // 4)[None, :]
        w0, w1, w2, w3 = _words(key, block)
        if skip > 0:
            n0, n1, n2, _ = _words(key, block + 1)
            if skip == 1:
                w0, w1, w2, w3 = w1, w2, w3, n0
            elif skip == 2:
                w0, w1, w2, w3 = w2, w3, n0, n1
            else:
                w0, w1, w2, w3 = w3, n0, n1, n2
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [M, N])
        if TURNED:
            word = tl.trans(word)
    else:
        index = start + (h * num_queries + place_t.to(tl.int64)) * num_keys + place_s
        w0, w1, w2, w3 = _words(key, index >> 2)
        lane = index & 3
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
    return tl.where((word >> 8).to(tl.int32) >= least, scale, 0.0).to(C)


@triton.jit
def score_gradient(
    x, dp, norm, shift, seen, t, s, place_t, place_s, s0, b, h, bounds, adds, drops, soft_cap, keep,
    WHOLE: tl.constexpr, TURNED: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The weights that are kept, times 1 / (1 - p), the gradient of the scores, and the derivative
    of the soft cap, from the products of a tile, lse and delta."""
    x, slope = to_scores(x, t, s, place_t, place_s, b, h, bounds, adds, soft_cap, C)
    weights = tl.exp(x - tl.where(norm == -float("inf"), float("inf"), norm))
    if not WHOLE:
        weights = tl.where(seen, weights, 0.0)
    kept = weights
    if drops[0] is not None:
        factor = kept_factor(place_t, place_s, s0, b, h, drops, keep, TURNED, C, M, N)
        kept = weights * factor
        dp = tl.where(factor == 0.0, 0.0, dp * factor)
    ds = weights * (dp - shift)
    if not WHOLE:
        ds = tl.where(seen, ds, 0.0)
        slope = tl.where(seen, slope, 0.0)
    return kept, ds, slope


@triton.jit
def add_product(sum, a, b, seen, WHOLE: tl.constexpr, PRECISION: tl.constexpr):
    """sum + a @ b, where nothing comes of pairs of `seen` [rows, depth] that don't see each other,
    be b nan there; a number of b that is seen and not finite gives nan."""
    if WHOLE:
        sum = tl.dot(a, b, sum, input_precision=PRECISION, out_dtype=sum.dtype)
    else:
        finite = tl.abs(b) < float("inf")
        clean = tl.where(finite, b, 0.0).to(b.dtype)
        sum = tl.dot(a, clean, sum, input_precision=PRECISION, out_dtype=sum.dtype)
        if tl.min(tl.min(finite.to(tl.int32), axis=1), axis=0) == 0:
            odd = tl.where(finite, 0.0, 1.0).to(b.dtype)
            hits = tl.dot(seen.to(b.dtype), odd, input_precision=PRECISION, out_dtype=sum.dtype)
            sum = tl.where(hits > 0.0, float("nan"), sum)
    return sum


@triton.jit
def tile_of(n, lists, place, OTHER_BLOCK: tl.constexpr):
    """The tile of visit n; OTHER_BLOCK: tiles in a listed block."""
    _, indices, most = lists
    if indices is not None:
        listed = tl.load(indices + place * most + n // OTHER_BLOCK)
        n = listed * OTHER_BLOCK + n % OTHER_BLOCK
    return n


@triton.jit
def _listed_before(indices, place, most, count, limit):
    """How many of the listed blocks are below `limit`."""
    lane = tl.arange(0, 128)
    found = 0
    for c in range(0, tl.cdiv(count, 128)):
        at = c * 128 + lane
        listed = tl.load(indices + place * most + at, mask=at < count, other=2147483647)
        found += tl.sum((listed < limit).to(tl.int32))
    return found


@triton.jit
def _segments(lo, a, b, hi, place, lists, EACH: tl.constexpr, OPAQUE: tl.constexpr):
    """The visits of blocks lo to hi, those from a to b seen whole, in tiles, EACH a block: where
    there are lists, of the blocks that are listed."""
    counts, indices, most = lists
    if counts is not None:
        count = tl.load(counts + place)
        if OPAQUE:
            lo, a, b, hi = 0, count, count, count
        else:
            lo = _listed_before(indices, place, most, count, lo)
            a = _listed_before(indices, place, most, count, a)
            b = _listed_before(indices, place, most, count, b)
            hi = _listed_before(indices, place, most, count, hi)
    elif OPAQUE:
        a, b = hi, hi
    a = tl.minimum(tl.maximum(a, lo), hi)
    b = tl.minimum(tl.maximum(b, a), hi)
    return lo * EACH, a * EACH, b * EACH, hi * EACH


@triton.jit
def row_visits(
    t0, place, bounds, lists, M: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """Visits of the queries from t0 on: lo, a, b, hi. OPAQUE: any pair may be hidden."""
    T, S, before, after = bounds
    last = tl.minimum(t0 + M, T) - 1
    unit = N * EACH
    # Keys below `whole_end` are seen by all; those from `whole_begin` on.
    whole_end, whole_begin = S, 0
    lo, hi = 0, tl.cdiv(S, unit)
    if after is not None:
        whole_end = tl.minimum(S, t0 + after + 1)
        hi = tl.minimum(hi, tl.cdiv(tl.maximum(last + after + 1, 0), unit))
    if before is not None:
        whole_begin = tl.maximum(last - before, 0)
        lo = tl.minimum(tl.maximum(t0 - before, 0) // unit, hi)
    a, b = tl.cdiv(whole_begin, unit), tl.maximum(whole_end, 0) // unit
    return _segments(lo, a, b, hi, place, lists, EACH, OPAQUE)


@triton.jit
def column_visits(
    s0, place, bounds, lists, M: tl.constexpr, N: tl.constexpr, EACH: tl.constexpr,
    OPAQUE: tl.constexpr,
):  # fmt: skip
    """Visits of the keys from s0 on, in tiles of queries: lo, a, b, hi."""
    T, S, before, after = bounds
    last = tl.minimum(s0 + N, S) - 1
    unit = M * EACH
    whole_end, whole_begin = T, 0
    lo, hi = 0, tl.cdiv(T, unit)
    if before is not None:
        whole_end = tl.minimum(T, s0 + before + 1)
        hi = tl.minimum(hi, tl.cdiv(last + before + 1, unit))
    if after is not None:
        whole_begin = tl.maximum(last - after, 0)
        lo = tl.minimum(tl.maximum(s0 - after, 0) // unit, hi)
    a, b = tl.cdiv(whole_begin, unit), whole_end // unit
    if s0 + N > S:
        b = a
    return _segments(lo, a, b, hi, place, lists, EACH, OPAQUE)
