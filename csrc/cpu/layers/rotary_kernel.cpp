// Rotary positions, head by head: x is read once through its strides, the tables stay in L1 over
// the heads of a token.
#include "rotary.h"
#include "../rows/storage.h"

namespace pyops::PYOPS_ISA {
namespace {

// (a, b) -> (a c - b s, b c + a s)
template <typename V>
inline __attribute__((always_inline)) void turn(V& a, V& b, V c, V s) {
    const V x = a, y = b;
    a = negative_fused(y, s, x * c);
    b = fused(x, s, y * c);
}

template <typename V, typename W>
inline __attribute__((always_inline)) V angle(const float* table, int64_t i, W sign) {
    if constexpr (sizeof(W) == 8) {
        return static_cast<double>(table[i]) * sign;
    } else {
        V a;
        load(a, table + i);
        return a * V(sign);
    }
}

template <typename S>
void turn_halves(S* out, const S* x, const float* cos, const float* sin, Real<S> sign,
                 int64_t half) {
    using W = Real<S>;
    for_each_of<S>(half, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V a, b;
        load(a, x + i);
        load(b, x + half + i);
        turn(a, b, angle<V>(cos, i, W(1)), angle<V>(sin, i, sign));
        store(out + i, a);
        store(out + half + i, b);
    });
}

// Pairs side by side: 16-bit numbers go through fp32, where the compiler can shuffle.
template <typename W>
void turn_pairs(W* out, const W* x, const float* cos, const float* sin, W sign, int64_t pairs) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < pairs; ++i) {
        W a = x[2 * i], b = x[2 * i + 1];
        turn(a, b, static_cast<W>(cos[i]), static_cast<W>(sin[i]) * sign);
        out[2 * i] = a;
        out[2 * i + 1] = b;
    }
}

template <typename S>
void turn_interleaved(S* out, const S* x, const float* cos, const float* sin, Real<S> sign,
                      int64_t half) {
    if constexpr (sizeof(S) > 2) {
        turn_pairs(out, x, cos, sin, sign, half);
    } else {
        float from[TILE], to[TILE];
        for (int64_t start = 0; start < half; start += TILE / 2) {
            const int64_t pairs = half - start < TILE / 2 ? half - start : TILE / 2;
            convert(from, x + 2 * start, 2 * pairs);
            turn_pairs(to, from, cos + start, sin + start, sign, pairs);
            convert(out + 2 * start, to, 2 * pairs);
        }
    }
}

}  // namespace

void rotary_kernel(const RotarySpan& span, int64_t first, int64_t last) {
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        const Real<S> sign = span.inverse ? -1 : 1;
        const int64_t turned = 2 * span.half;
        for (int64_t row = first; row < last; ++row) {
            const int64_t head = row % span.H, token = row / span.H, t = token % span.T,
                          b = token / span.T;
            const S* const x = static_cast<const S*>(span.x) + b * span.stride[0] +
                               t * span.stride[1] + head * span.stride[2];
            S* const out = static_cast<S*>(span.out) + row * span.K;
            const int64_t at = b * span.table_stride + t * span.half;
            if (span.interleaved)
                turn_interleaved(out, x, span.cos + at, span.sin + at, sign, span.half);
            else
                turn_halves(out, x, span.cos + at, span.sin + at, sign, span.half);
            if (turned < span.K)
                memcpy(out + turned, x + turned, static_cast<size_t>(span.K - turned) * sizeof(S));
        }
    });
}

}  // namespace pyops::PYOPS_ISA
