// From the products of a tile to its scores: which pairs see each other, what is added, which
// weights are dropped. Rows are QT keys long, of which `count` exist.
#pragma once
#include "attention_tile.h"
#include "../rows/philox_fill.h"

namespace pyops::PYOPS_ISA {
namespace {

using pyops::sign_of;

// A tile of keys for a row of the batch, as all queries find it.
struct KeyTile {
    int64_t b, first, count, place;  // place: of the first key
    bool in_order;                   // the places of the others follow
    const int64_t* places;           // null: in order

    KeyTile(const AttentionSpan& span, int64_t row, int64_t tile)
        : b(row), first(tile * QT), count(span.S - first < QT ? span.S - first : QT) {
        places = span.key_places ? span.key_places + first : nullptr;
        place = places ? places[0] : first;
        in_order = true;
        for (int64_t n = 1; places && n < count; ++n) in_order &= places[n] == place + n;
    }
    int64_t place_of(int64_t n) const { return in_order ? place + n : places[n]; }
};

inline int64_t query_place(const AttentionSpan& span, int64_t t) {
    return span.query_places ? span.query_places[t] : t;
}

inline uint64_t lowest(int64_t n) {  // n bits
    return n <= 0 ? 0 : n >= QT ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
}

inline uint64_t near_bits(const AttentionSpan& span, const KeyTile& keys, int64_t place) {
    const int64_t last = span.causal ? place : span.after >= 0 ? place + span.after : INT64_MAX;
    const int64_t first = span.before >= 0 ? place - span.before : INT64_MIN;
    if (keys.in_order) {
        uint64_t bits = last - keys.place >= QT ? ~uint64_t{0} : lowest(last - keys.place + 1);
        if (first > keys.place) bits &= ~lowest(first - keys.place);
        return bits;
    }
    uint64_t bits = 0;
    for (int64_t n = 0; n < keys.count; ++n)
        bits |= static_cast<uint64_t>(keys.places[n] <= last && keys.places[n] >= first) << n;
    return bits;
}

inline bool is_listed(const int32_t* sorted, int64_t n, int64_t wanted) {
    int64_t low = 0;
    while (n > 0) {
        const int64_t half = n / 2;
        if (sorted[low + half] < wanted) {
            low += half + 1;
            n -= half + 1;
        } else {
            if (sorted[low + half] == wanted) return true;
            n = half;
        }
    }
    return false;
}

inline uint64_t layout_bits(const AttentionSpan& span, const KeyTile& keys, int64_t h,
                            int64_t row) {
    const int64_t list = (span.layout_heads > 1 ? h : 0) * span.query_blocks + row;
    const int32_t* const indices = span.row_indices + list * span.most;
    uint64_t bits = 0;
    for (int64_t begin = keys.first; begin < keys.first + keys.count;) {
        const int64_t block = begin / span.block, end = (block + 1) * span.block;
        if (is_listed(indices, span.row_counts[list], block))
            bits |= lowest(end - keys.first) & ~lowest(begin - keys.first);
        begin = end;
    }
    return bits;
}

// seen[m]: a bit for each key that query t + m of head h sees; returns whether all see all.
inline void seen_bits(uint64_t* seen, const AttentionSpan& span, const KeyTile& keys, int64_t h,
                      int64_t t, int64_t rows) {
    uint64_t all = lowest(keys.count);
    if (span.mask) {
        const uint8_t* const mask = span.mask + keys.b * span.S + keys.first;
        uint64_t bits = 0;
        for (int64_t n = 0; n < keys.count; ++n) bits |= static_cast<uint64_t>(mask[n] != 0) << n;
        all &= bits;
    }
    const bool near = span.causal || span.before >= 0 || span.after >= 0;
    uint64_t same_document = ~uint64_t{0}, same_block = ~uint64_t{0};
    int64_t document = -2, block = -1;
    for (int64_t m = 0; m < rows; ++m) {
        if (span.query_documents) {
            const int32_t own = span.query_documents[keys.b * span.T + t + m];
            if (own != document) {
                document = own;
                same_document = 0;
                const int32_t* const ids = span.key_documents + keys.b * span.S + keys.first;
                for (int64_t n = 0; n < keys.count && own >= 0; ++n)
                    same_document |= static_cast<uint64_t>(ids[n] == own) << n;
            }
        }
        if (span.block && (t + m) / span.block != block) {
            block = (t + m) / span.block;
            same_block = layout_bits(span, keys, h, block);
        }
        seen[m] = all & same_document & same_block;
        if (near) seen[m] &= near_bits(span, keys, query_place(span, t + m));
    }
    for (int64_t m = rows; m < QT; ++m) seen[m] = 0;
}

template <typename W>
void keep_seen(W* x, uint64_t bits, W otherwise) {
    for (int64_t half = 0; half < QT; half += 32) {
        const uint32_t word = static_cast<uint32_t>(bits >> half);
        W* const out = x + half;
        PYOPS_VECTORISE
        for (int n = 0; n < 32; ++n) out[n] = (word >> n) & 1 ? out[n] : otherwise;
    }
}

template <typename W>
void cap_row(W* x, W* slope, double cap) {
    for_each_of<W>(QT, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V s;
        load(s, x + i);
        const SoftCap<V> capped(s, V(static_cast<W>(cap)));
        store(x + i, capped.value);
        if (slope) store(slope + i, capped.slope);
    });
}

template <typename S, typename W>
void add_bias(W* x, const S* bias, int64_t n, int64_t stride) {
    if (stride == 0) {
        W value;
        load(value, bias);
        for (int64_t i = 0; i < n; ++i) x[i] += value;
        return;
    }
    for_each_of<S>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type a, s;
        load(a, bias + i);
        load(s, x + i);
        store(x + i, s + a);
    });
}

template <typename W>
void add_bias_row(W* x, const AttentionSpan& span, const KeyTile& keys, int64_t h, int64_t t) {
    const int64_t* const stride = span.bias_stride;
    const int64_t at = keys.b * stride[0] + h * stride[1] + t * stride[2] + keys.first * stride[3];
    if constexpr (sizeof(W) == 8) {
        add_bias(x, static_cast<const double*>(span.bias) + at, keys.count, stride[3]);
    } else {
        if (span.bias_dtype == FP32)
            add_bias(x, static_cast<const float*>(span.bias) + at, keys.count, stride[3]);
        else if (span.bias_dtype == BF16)
            add_bias(x, static_cast<const Bf16*>(span.bias) + at, keys.count, stride[3]);
        else
            add_bias(x, static_cast<const Fp16*>(span.bias) + at, keys.count, stride[3]);
    }
}

// A tile of a matrix with a number for each pair of a query and a key, whose rows lie too far apart
// for the processor to foresee them. Each is asked for on its own, beside work on another row: all
// of them at once would be more than a core can wait for. Into L2, for rows that are a multiple of
// 4 KiB apart share few places of L1.
struct PairsAhead {
    const char* tile = nullptr;
    int64_t rows = 0, row_bytes = 0, stride = 0;

    template <bool WRITTEN>
    void fetch(int64_t m) const {
        if (m >= rows) return;
        const char* const row = tile + m * stride;
        for (int64_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(row + at, WRITTEN, 2);
        // GCC takes a function that only prefetches for one without effect, and drops its calls
        asm volatile("");
    }
};

// The bias of the tile that comes after this one.
inline PairsAhead bias_ahead(const AttentionSpan& span, int64_t b, int64_t h, int64_t t,
                             int64_t first_key) {
    if (!span.bias) return {};
    const int64_t* const stride = span.bias_stride;
    const int64_t size = size_of(span.bias_dtype),
                  keys = span.S - first_key < QT ? span.S - first_key : QT,
                  queries = span.T - t < QT ? span.T - t : QT;
    return {static_cast<const char*>(span.bias) +
                size * (b * stride[0] + h * stride[1] + t * stride[2] + first_key * stride[3]),
            stride[2] == 0 ? 1 : queries, stride[3] == 0 ? 1 : keys * size, stride[2] * size};
}

inline int64_t clamped(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x > high ? high : x;
}

template <typename W>
void add_by_distance(W* x, const AttentionSpan& span, const KeyTile& keys, int64_t h,
                     int64_t place) {
    const int64_t reach = span.reach;
    const W* const table =
        static_cast<const W*>(span.by_distance) + h * (2 * reach + 2 * QT + 1) + reach + QT;
    if (keys.in_order) {  // beyond the reach all is the same, so a row starts within it
        const W* const from = table + clamped(keys.place - place, -reach - QT, reach + 1);
        for_each_of<W>(QT, [=](auto lane, int64_t i) __attribute__((always_inline)) {
            typename decltype(lane)::type a, s;
            load(a, from + i);
            load(s, x + i);
            store(x + i, s + a);
        });
    } else {
        for (int64_t n = 0; n < keys.count; ++n)
            x[n] += table[clamped(keys.places[n] - place, -reach, reach)];
    }
}

template <typename W>
void subtract_slope(W* x, W slope, const KeyTile& keys, int64_t place) {
    if (keys.in_order) {
        const W start = static_cast<W>(keys.place - place);
        PYOPS_VECTORISE
        for (int n = 0; n < QT; ++n)
            x[n] = fused(-slope, magnitude(start + static_cast<W>(n)), x[n]);
    } else {
        for (int64_t n = 0; n < keys.count; ++n)
            x[n] = fused(-slope, magnitude(static_cast<W>(keys.places[n] - place)), x[n]);
    }
}

// The score of query t and each key of the tile, from their product. slope: derivative of the soft
// cap, or null.
template <typename W>
inline void score_row(W* x, W* slope, const AttentionSpan& span, const KeyTile& keys, int64_t h,
                      int64_t t) {
    if (span.soft_cap != 0.0) cap_row(x, slope, span.soft_cap);
    if (span.bias) add_bias_row(x, span, keys, h, t);
    if (!span.by_distance && !span.slopes) return;
    const int64_t place = query_place(span, t);
    if (span.by_distance) add_by_distance(x, span, keys, h, place);
    if (span.slopes) subtract_slope(x, static_cast<const W*>(span.slopes)[h], keys, place);
}

// factor[n]: `scale` where the weight of query t and key n is kept, else 0.
template <typename W>
void keep_factors(W* factor, const AttentionSpan& span, const KeyTile& keys, int64_t h, int64_t t,
                  W scale) {
    const int64_t place = query_place(span, t);
    const uint64_t first = span.counters.at(keys.b, h, place, keys.place);
    const float p = span.p;
    if (!keys.in_order) {
        for (int64_t n = 0; n < keys.count; ++n) {
            const uint64_t i = first + static_cast<uint64_t>(keys.places[n] - keys.place);
            const uint32_t word = philox4x32(span.key, i >> 2).word[i & 3];
            factor[n] = uniform_of(word) >= p ? scale : W(0);
        }
        for (int64_t n = keys.count; n < QT; ++n) factor[n] = W(0);
        return;
    }
    constexpr int64_t BLOCKS = QT / 4;
    uint32_t words[4 * (BLOCKS + 8)];
    const int64_t skip = static_cast<int64_t>(first & 3);
    philox_fill(words, span.key, first >> 2, 0, 0, skip ? BLOCKS + 8 : BLOCKS);
    const uint32_t* const own = words + skip;
    PYOPS_VECTORISE
    for (int n = 0; n < QT; ++n) factor[n] = uniform_of(own[n]) >= p ? scale : W(0);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
