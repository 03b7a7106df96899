// Attention forward: a block of queries is a piece of work, which goes over the tiles of keys that
// it sees, in ascending order, with a softmax that is corrected as larger scores turn up
// (FlashAttention-2: Dao, arXiv:2307.08691, algorithm 1).
//
//   tile of keys -> K^T, V packed once for all queries of the block
//     for 64 queries: s = q K^T -> scores -> m' = max(m, row max) -> e = exp(s - m')
//                     l = l exp(m - m') + sum of e;  acc = acc exp(m - m') + keep e V
//   y = acc / (l (1 - p)), lse = m + log l
#include "attention_scores.h"
#include "../rows/softmax_row.h"

namespace pyops::PYOPS_ISA {
namespace {

#if defined(__AVX512F__)
inline float maximum_of(const float* x) {
    Vec a, b, c, d;
    load(a, x);
    load(b, x + 16);
    load(c, x + 32);
    load(d, x + 48);
    return _mm512_reduce_max_ps(at_least(at_least(a, b), at_least(c, d)).x);
}
#elif defined(__AVX2__)
inline float maximum_of(const float* x) {
    Vec found, next;
    load(found, x);
    for (int64_t n = 8; n < QT; n += 8) {
        load(next, x + n);
        found = at_least(found, next);
    }
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(found.x), _mm256_extractf128_ps(found.x, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
#endif
// The largest of QT scores; a nan among them may be passed over, and turns up in the sum.
template <typename W>
W maximum_of(const W* x) {
    W lanes[4] = {x[0], x[1], x[2], x[3]};
    for (int64_t n = 4; n < QT; n += 4)
        for (int64_t k = 0; k < 4; ++k) lanes[k] = x[n + k] > lanes[k] ? x[n + k] : lanes[k];
    W found = lanes[0];
    for (const W lane : lanes) found = lane > found ? lane : found;
    return found;
}

template <typename W>
void multiply(W* x, const W* by, int64_t n) {
    for_each_of<W>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type a, b;
        load(a, x + i);
        load(b, by + i);
        store(x + i, a * b);
    });
}

template <typename W>
void scale_row(W* x, W by, int64_t n) {
    for_each_of<W>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type a;
        load(a, x + i);
        store(x + i, a * decltype(a)(by));
    });
}

// The room of one piece of work.
template <typename W>
struct ForwardRoom {
    W *q, *sum, *key, *key_turned, *value, *scores, *maximum;
    double* total;

    ForwardRoom(void* scratch, int64_t queries, int64_t K, int64_t ld) {
        W* next = static_cast<W*>(scratch);
        const auto take = [&](int64_t n) {
            W* const found = next;
            next += n;
            return found;
        };
        q = take(queries * ld);
        sum = take(queries * ld);
        key = take(QT * ld);
        key_turned = take(QT * padded(K, WIDTH_UNIT));
        value = take(QT * ld);
        scores = take(QT * QT);
        maximum = take(queries);
        total = reinterpret_cast<double*>(take(queries * 2));
    }
};

// 64 queries from t on, whose numbers begin at `row` of the room, and a tile of keys.
template <typename W>
void visit(const AttentionSpan& span, const ForwardRoom<W>& room, const KeyTile& keys, int64_t h,
           int64_t t, int64_t row, bool full, const PairsAhead& next_bias, int64_t ld) {
    const int64_t rows = span.T - t < QT ? span.T - t : QT, packed = padded(rows, MR);
    product<false>(room.scores, QT, packed, QT, Factor<W>{room.q + row * ld, ld, 1},
                   room.key_turned, QT, span.K);
    uint64_t seen[QT];
    if (!full) seen_bits(seen, span, keys, h, t, rows);
    W factor[QT];
    for (int64_t m = 0; m < rows; ++m) {
        W* const x = room.scores + m * QT;
        next_bias.fetch<false>(m);
        score_row(x, static_cast<W*>(nullptr), span, keys, h, t + m);
        if (!full && seen[m] != ~uint64_t{0}) keep_seen(x, seen[m], W(-INFINITY));
        const W before = room.maximum[row + m], here = maximum_of(x),
                maximum = here > before ? here : before, shift = softmax_shift(maximum);
        const W sum = exponentials(x, QT, shift);
        if (maximum != before) {
            const W correction = softmax_exponential(before - shift);
            room.total[row + m] *= static_cast<double>(correction);
            scale_row(room.sum + (row + m) * ld, correction, ld);
            room.maximum[row + m] = maximum;
        }
        room.total[row + m] += static_cast<double>(sum);
        if (span.drops) {
            keep_factors(factor, span, keys, h, t + m, W(1));
            multiply(x, factor, QT);
        }
    }
    W* const out = room.sum + row * ld;
    const Factor<W> weights{room.scores, QT, 1};
    if (!full && !all_finite(room.value, QT * ld))
        seen_product(out, ld, rows, ld, weights, room.value, ld, keys.count, seen, true);
    else
        product<true>(out, ld, packed, ld, weights, room.value, ld, keys.count);
}

template <typename S>
void finish(const AttentionSpan& span, const ForwardRoom<Real<S>>& room, int64_t b, int64_t h,
            int64_t t, int64_t rows, int64_t ld) {
    using W = Real<S>;
    for (int64_t m = 0; m < rows; ++m) {
        const double total = room.total[m];
        const double share = total == 0.0 ? 0.0 : (span.drops ? span.keep_scale : 1.0) / total;
        S* const y = static_cast<S*>(span.y) + ((b * span.T + t + m) * span.H + h) * span.K;
        store_row(y, room.sum + m * ld, span.K, static_cast<W>(share));
        static_cast<W*>(span.lse)[(b * span.H + h) * span.T + t + m] =
            static_cast<W>(static_cast<double>(room.maximum[m]) + log(total));
    }
}

template <typename S>
void forward(const AttentionSpan& span, int64_t item, void* scratch) {
    using W = Real<S>;
    const int64_t heads = span.B * span.H,
                  blocks = (span.T + span.query_block - 1) / span.query_block;
    // The last queries see most where causality holds: they come first
    const int64_t t0 = (blocks - 1 - item / heads) * span.query_block, b = item % heads / span.H,
                  h = item % span.H, g = h / (span.H / span.G);
    const int64_t left = span.T - t0, rows = left < span.query_block ? left : span.query_block;
    const int64_t tiles = (rows + QT - 1) / QT, ld = padded(span.K, WIDTH_UNIT);
    const ForwardRoom<W> room(scratch, span.query_block, span.K, ld);
    load_tile<S>(room.q, ld, span.q, b, t0, rows, h, span.K, span.scale, tiles * QT);
    memset(room.sum, 0, static_cast<size_t>(tiles * QT * ld) * sizeof(W));
    for (int64_t m = 0; m < rows; ++m) room.maximum[m] = W(-INFINITY), room.total[m] = 0.0;

    const VisitLists& lists = span.rows;
    const int64_t list = (b * lists.b_stride + h * lists.h_stride) * lists.tiles + t0 / QT;
    const Visit *next[8], *last[8];
    for (int64_t k = 0; k < tiles; ++k) {
        next[k] = lists.visits + lists.starts[list + k];
        last[k] = lists.visits + lists.starts[list + k + 1];
    }
    for (;;) {
        int64_t tile = INT32_MAX;
        for (int64_t k = 0; k < tiles; ++k)
            if (next[k] < last[k] && next[k]->tile < tile) tile = next[k]->tile;
        if (tile == INT32_MAX) break;
        const KeyTile keys(span, b, tile);
        load_tile<S>(room.key, ld, span.k, b, keys.first, keys.count, g, span.K, 1.0, QT);
        transpose_tile(room.key_turned, room.key, ld, span.K);
        load_tile<S>(room.value, ld, span.v, b, keys.first, keys.count, g, span.K, 1.0, QT);
        for (int64_t k = 0; k < tiles; ++k)
            if (next[k] < last[k] && next[k]->tile == tile) {
                const Visit& here = *next[k]++;
                PairsAhead next_bias;
                if (next[k] < last[k])
                    next_bias = bias_ahead(span, b, h, t0 + k * QT, next[k]->tile * QT);
                visit(span, room, keys, h, t0 + k * QT, k * QT, here.full, next_bias, ld);
            }
    }
    finish<S>(span, room, b, h, t0, rows, ld);
}

}  // namespace

void attention_forward_kernel(const AttentionSpan& span, int64_t item, void* scratch) {
    with_storage(span.dtype, [&](auto storage) {
        forward<typename decltype(storage)::type>(span, item, scratch);
    });
}

}  // namespace pyops::PYOPS_ISA
