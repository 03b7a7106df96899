// Attention backward: a tile of keys is a piece of work, which goes over the tiles of queries that
// see it, in ascending order, and makes each tile of scores once.
//
//   s = q K^T -> scores -> P = exp(s - lse);   dP = dy V^T;   dS = P (keep dP - delta)
//   dV += (keep P)^T dy       dK += dS^T q       dq += dS K
//
// dK and dV are the piece's own. dq is not: pieces of a head add to a tile of it in the order of
// their keys, each when it is its turn. Pieces are begun in that order, so the one that is waited
// for is always under way, and the sums have one order for any number of threads.
#include <sched.h>

#include "attention_scores.h"
#include "../rows/softmax_row.h"

namespace pyops::PYOPS_ISA {
namespace {

// The room of one piece of work.
template <typename W>
struct BackwardRoom {
    W *key, *key_turned, *value_turned, *q, *dy, *dq, *dk, *dv, *weights, *kept, *gradient, *slope;

    BackwardRoom(void* scratch, int64_t K, int64_t ld) {
        W* next = static_cast<W*>(scratch);
        const auto take = [&](int64_t n) {
            W* const found = next;
            next += n;
            return found;
        };
        const int64_t turned = QT * padded(K, WIDTH_UNIT);
        key = take(QT * ld);
        key_turned = take(turned);
        value_turned = take(turned);
        q = take(QT * ld);
        dy = take(QT * ld);
        dq = take(QT * ld);
        dk = take(QT * ld);
        dv = take(QT * ld);
        weights = take(QT * QT);
        kept = take(QT * QT);
        gradient = take(QT * QT);
        slope = take(QT * QT);
    }
};

// Where one tile of queries and one of keys meet.
struct Meeting {
    const KeyTile& keys;
    int64_t h, t, rows;  // head, first query, how many
    bool full;
    PairsAhead next_bias, own_dbias;
    uint64_t seen[QT];
};

// dS = P (f dP - delta) in place of dP, and kept = f P; f: of dropout, or null.
template <typename W>
void gradient_row(W* dp, W* kept, const W* weights, const W* factor, W delta) {
    if (factor) {
        for_each_of<W>(QT, [=](auto lane, int64_t i) __attribute__((always_inline)) {
            using V = typename decltype(lane)::type;
            V p, d, f;
            load(p, weights + i);
            load(d, dp + i);
            load(f, factor + i);
            store(kept + i, p * f);
            store(dp + i, p * (unless_zero(f, d * f) - V(delta)));
        });
    } else {
        for_each_of<W>(QT, [=](auto lane, int64_t i) __attribute__((always_inline)) {
            using V = typename decltype(lane)::type;
            V p, d;
            load(p, weights + i);
            load(d, dp + i);
            store(dp + i, p * (d - V(delta)));
        });
    }
}

template <typename W>
void add_to_row(W* sum, const W* x, int64_t n, W factor) {
    for_each_of<W>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V a, b;
        load(a, sum + i);
        load(b, x + i);
        store(sum + i, fused(b, V(factor), a));
    });
}

// Scores to weights and to their gradient, row by row.
template <typename W>
void differentiate(const AttentionSpan& span, const AttentionGradient& grad,
                   const BackwardRoom<W>& room, const Meeting& at) {
    const int64_t row0 = (at.keys.b * span.H + at.h) * span.T + at.t;
    const W *const lse = static_cast<const W*>(span.lse) + row0, *const delta =
                                                                     static_cast<const W*>(
                                                                         grad.delta) +
                                                                     row0;
    W factor[QT];
    for (int64_t m = 0; m < at.rows; ++m) {
        W *const x = room.weights + m * QT, *const dp = room.gradient + m * QT,
                 *const kept = room.kept + m * QT,
                 *const slope = span.soft_cap != 0.0 ? room.slope + m * QT : nullptr;
        at.next_bias.fetch<false>(m);
        at.own_dbias.fetch<true>(m);
        score_row(x, slope, span, at.keys, at.h, at.t + m);
        const bool all = at.full || at.seen[m] == ~uint64_t{0};
        if (!all) keep_seen(x, at.seen[m], W(-INFINITY));
        weights_of(x, lse[m] == W(-INFINITY) ? W(INFINITY) : lse[m], QT);
        if (span.drops)
            keep_factors(factor, span, at.keys, at.h, at.t + m, static_cast<W>(span.keep_scale));
        gradient_row(dp, kept, x, span.drops ? factor : nullptr, delta[m]);
        if (!all) keep_seen(dp, at.seen[m], W(0));
    }
    // Rows that only fill a register up
    const size_t filled = static_cast<size_t>((padded(at.rows, MR) - at.rows) * QT) * sizeof(W);
    memset(room.gradient + at.rows * QT, 0, filled);
}

// Where store_bias_gradient will write.
inline PairsAhead stored_ahead(const AttentionSpan& span, const AttentionGradient& grad,
                               const Meeting& at) {
    const int64_t size = size_of(grad.dbias_dtype),
                  first = ((at.keys.b * span.H + at.h) * span.T + at.t) * span.S + at.keys.first;
    return {static_cast<const char*>(grad.dbias) + first * size, at.rows, at.keys.count * size,
            span.S * size};
}

// A number of dbias belongs to one pair: it is stored as it is.
template <typename W>
void store_bias_gradient(const AttentionSpan& span, const AttentionGradient& grad,
                         const BackwardRoom<W>& room, const Meeting& at) {
    const int64_t first = ((at.keys.b * span.H + at.h) * span.T + at.t) * span.S + at.keys.first;
    const auto store_rows = [&](auto* out) {
        for (int64_t m = 0; m < at.rows; ++m)
            store_row(out + first + m * span.S, room.gradient + m * QT, at.keys.count, W(1));
    };
    if constexpr (sizeof(W) == 8) {
        store_rows(static_cast<double*>(grad.dbias));
    } else {
        if (grad.dbias_dtype == FP32)
            store_rows(static_cast<float*>(grad.dbias));
        else if (grad.dbias_dtype == BF16)
            store_rows(static_cast<Bf16*>(grad.dbias));
        else
            store_rows(static_cast<Fp16*>(grad.dbias));
    }
}

template <typename W>
void add_bias_gradient(const AttentionSpan& span, const AttentionGradient& grad,
                       const BackwardRoom<W>& room, const Meeting& at) {
    const int64_t* const sizes = grad.dbias_sizes;
    const int64_t b = sizes[0] > 1 ? at.keys.b : 0, h = sizes[1] > 1 ? at.h : 0;
    for (int64_t m = 0; m < at.rows; ++m) {
        const int64_t t = sizes[2] > 1 ? at.t + m : 0;
        W* const out = static_cast<W*>(grad.dbias) + ((b * sizes[1] + h) * sizes[2] + t) * span.S +
                       at.keys.first;
        add_to_row(out, room.gradient + m * QT, at.keys.count, W(1));
    }
}

// Sums over the diagonals of the tile, each a distance, then into its bucket.
template <typename W>
void add_table_gradient(const AttentionSpan& span, const AttentionGradient& grad,
                        const BackwardRoom<W>& room, const Meeting& at, double* sums) {
    const int64_t reach = span.reach;
    const int32_t* const bucket = grad.buckets + reach;
    bool in_order = at.keys.in_order;
    const int64_t place = query_place(span, at.t);
    for (int64_t m = 1; m < at.rows; ++m) in_order &= query_place(span, at.t + m) == place + m;
    if (!in_order) {
        for (int64_t m = 0; m < at.rows; ++m)
            for (int64_t n = 0; n < at.keys.count; ++n) {
                const int64_t away = at.keys.place_of(n) - query_place(span, at.t + m);
                sums[bucket[clamped(away, -reach, reach)]] +=
                    static_cast<double>(room.gradient[m * QT + n]);
            }
        return;
    }
    W diagonal[2 * QT] = {};
    for (int64_t m = 0; m < at.rows; ++m)
        add_to_row(diagonal + QT - 1 - m, room.gradient + m * QT, at.keys.count, W(1));
    const int64_t first = at.keys.place - place - (QT - 1);
    for (int64_t n = 0; n < 2 * QT - 1; ++n)
        sums[bucket[clamped(first + n, -reach, reach)]] += static_cast<double>(diagonal[n]);
}

// C += A B, where nothing may come of what is not seen.
template <typename W>
void add_product(W* c, int64_t ld, const Factor<W>& a, const W* b, const Meeting& at,
                 bool by_query) {
    const int64_t rows = by_query ? padded(at.rows, MR) : QT,
                  depth = by_query ? at.keys.count : at.rows;
    if (!at.full && !all_finite(b, QT * ld))
        seen_product(c, ld, by_query ? at.rows : QT, ld, a, b, ld, depth, at.seen, by_query);
    else
        product<true>(c, ld, rows, ld, a, b, ld, depth);
}

inline void wait_for_turn(const int32_t* turn, int32_t mine) {
    for (int64_t tries = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != mine; ++tries)
        if (tries > 64) sched_yield();
}

template <typename S>
void meet(const AttentionSpan& span, const AttentionGradient& grad,
          const BackwardRoom<Real<S>>& room, Meeting& at, int32_t ordinal, int64_t ld) {
    using W = Real<S>;
    const int64_t b = at.keys.b, packed = padded(at.rows, MR);
    load_tile<S>(room.q, ld, span.q, b, at.t, at.rows, at.h, span.K, span.scale, QT);
    load_tile<S>(room.dy, ld, grad.dy, b, at.t, at.rows, at.h, span.K, 1.0, QT);
    product<false>(room.weights, QT, packed, QT, Factor<W>{room.q, ld, 1}, room.key_turned, QT,
                   span.K);
    product<false>(room.gradient, QT, packed, QT, Factor<W>{room.dy, ld, 1}, room.value_turned, QT,
                   span.K);
    if (!at.full) seen_bits(at.seen, span, at.keys, at.h, at.t, at.rows);
    differentiate(span, grad, room, at);
    if (grad.dbias && grad.dbias_shared)
        add_bias_gradient(span, grad, room, at);
    else if (grad.dbias)
        store_bias_gradient(span, grad, room, at);
    if (grad.dtable) {
        const int64_t tiles = (span.S + QT - 1) / QT;
        add_table_gradient(
            span, grad, room, at,
            grad.dtable + ((b * tiles + at.keys.first / QT) * span.H + at.h) * grad.num_buckets);
    }
    if (span.soft_cap != 0.0)
        for (int64_t i = 0; i < at.rows * QT; ++i) room.gradient[i] *= room.slope[i];
    const W* const kept = span.drops ? room.kept : room.weights;
    add_product(room.dv, ld, Factor<W>{kept, 1, QT}, room.dy, at, false);
    add_product(room.dk, ld, Factor<W>{room.gradient, 1, QT}, room.q, at, false);
    memset(room.dq, 0, static_cast<size_t>(QT * ld) * sizeof(W));
    add_product(room.dq, ld, Factor<W>{room.gradient, QT, 1}, room.key, at, true);

    const int64_t tiles = (span.T + QT - 1) / QT;
    int32_t* const turn = grad.turns + (b * span.H + at.h) * tiles + at.t / QT;
    wait_for_turn(turn, ordinal);
    for (int64_t m = 0; m < at.rows; ++m)
        add_to_row(static_cast<W*>(grad.dq) + ((b * span.T + at.t + m) * span.H + at.h) * span.K,
                   room.dq + m * ld, span.K, static_cast<W>(span.scale));
    __atomic_store_n(turn, ordinal + 1, __ATOMIC_RELEASE);
}

template <typename S>
void backward(const AttentionSpan& span, const AttentionGradient& grad, int64_t b, int64_t g,
              int64_t tile, void* scratch) {
    using W = Real<S>;
    const int64_t ld = padded(span.K, WIDTH_UNIT), group = span.H / span.G;
    const BackwardRoom<W> room(scratch, span.K, ld);
    const KeyTile keys(span, b, tile);
    // dv's room holds V until its turned copy is made
    load_tile<S>(room.key, ld, span.k, b, keys.first, keys.count, g, span.K, 1.0, QT);
    load_tile<S>(room.dv, ld, span.v, b, keys.first, keys.count, g, span.K, 1.0, QT);
    transpose_tile(room.key_turned, room.key, ld, span.K);
    transpose_tile(room.value_turned, room.dv, ld, span.K);
    memset(room.dk, 0, static_cast<size_t>(QT * ld) * sizeof(W));
    memset(room.dv, 0, static_cast<size_t>(QT * ld) * sizeof(W));
    const VisitLists& lists = span.columns;
    for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        const int64_t list = (b * lists.b_stride + h * lists.h_stride) * lists.tiles + tile;
        for (int64_t n = lists.starts[list]; n < lists.starts[list + 1]; ++n) {
            const Visit& visit = lists.visits[n];
            const int64_t t = visit.tile * QT, left = span.T - t;
            Meeting at{keys, h, t, left < QT ? left : QT, visit.full, {}, {}, {}};
            if (n + 1 < lists.starts[list + 1])
                at.next_bias = bias_ahead(span, b, h, lists.visits[n + 1].tile * QT, keys.first);
            if (grad.dbias && !grad.dbias_shared) at.own_dbias = stored_ahead(span, grad, at);
            meet<S>(span, grad, room, at, visit.ordinal, ld);
        }
    }
    for (int64_t n = 0; n < keys.count; ++n) {
        const int64_t row = ((b * span.S + keys.first + n) * span.G + g) * span.K;
        store_row(static_cast<S*>(grad.dk) + row, room.dk + n * ld, span.K, W(1));
        store_row(static_cast<S*>(grad.dv) + row, room.dv + n * ld, span.K, W(1));
    }
}

// Of query t, for all heads: sum of dy y, less what lse's gradient brings.
template <typename S>
void delta(const AttentionSpan& span, const AttentionGradient& grad, const void* dlse, void* out,
           int64_t row) {
    using W = Real<S>;
    const int64_t b = row / span.T, t = row % span.T;
    for (int64_t h = 0; h < span.H; ++h) {
        const S* const y = static_cast<const S*>(grad.y) + (row * span.H + h) * span.K;
        const S* const dy = static_cast<const S*>(grad.dy.data) + b * grad.dy.batch +
                            t * grad.dy.row + h * grad.dy.head;
        Sums<W> sum;
        across<W>(span.K, [&](auto lane, int64_t i, int slot) __attribute__((always_inline)) {
            typename decltype(lane)::type a, c;
            load(a, y + i);
            load(c, dy + i);
            sum.add_product(a, c, slot);
        });
        const int64_t at = (b * span.H + h) * span.T + t;
        const W more = dlse ? static_cast<const W*>(dlse)[at] : W(0);
        static_cast<W*>(out)[at] = sum.total() - more;
    }
}

}  // namespace

void attention_backward_kernel(const AttentionSpan& span, const AttentionGradient& grad, int64_t b,
                               int64_t g, int64_t tile, void* scratch) {
    with_storage(span.dtype, [&](auto storage) {
        backward<typename decltype(storage)::type>(span, grad, b, g, tile, scratch);
    });
}

void attention_delta_kernel(const AttentionSpan& span, const AttentionGradient& grad,
                            const void* dlse, void* out, int64_t row) {
    with_storage(span.dtype, [&](auto storage) {
        delta<typename decltype(storage)::type>(span, grad, dlse, out, row);
    });
}

}  // namespace pyops::PYOPS_ISA
