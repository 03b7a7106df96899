// Attention of one new token for each row over what is kept. A group of heads of a row is a piece
// of work: its key is turned and kept with its value, and then each of its queries goes over the
// keys up to its own place.
//
//   s[n] = scale q . k[n]      e = exp(s - max s)      y = sum of e[n] v[n] / sum of e
#include "token_attention.h"

#include "../layers/rotary.h"
#include "../rows/softmax_row.h"

namespace pyops::PYOPS_ISA {

void rotary_kernel(const RotarySpan&, int64_t, int64_t);

namespace {

#define PYOPS_INLINE __attribute__((always_inline))

// A head as it is turned at the place of its row, or as it is.
void turn_head(const TokenAttention& all, float* out, const float* x, int64_t row) {
    if (!all.cos) {
        memcpy(out, x, static_cast<size_t>(all.width) * sizeof(float));
        return;
    }
    RotarySpan span{};
    span.x = x;
    span.out = out;
    span.cos = all.cos + row * all.half;
    span.sin = all.sin + row * all.half;
    span.T = span.H = 1;
    span.K = all.width;
    span.half = all.half;
    span.dtype = FP32;
    span.interleaved = all.interleaved;
    rotary_kernel(span, 0, 1);
}

// Scores of keys 0 .. n - 1; the largest of them.
float scores_of(float* scores, const float* q, const float* keys, int64_t n, int64_t width,
                float scale) {
    float largest = -INFINITY;
    for (int64_t s = 0; s < n; ++s) {
        const float* const key = keys + s * width;
        Sums<float> sum;
        across<float>(width, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
            typename decltype(lane)::type a, b;
            load(a, q + i);
            load(b, key + i);
            sum.add_product(a, b, slot);
        });
        scores[s] = scale * sum.total();
        largest = scores[s] > largest ? scores[s] : largest;
    }
    return largest;
}

// y[.. COUNT registers of V] = share * the sum of weights[n] values[n].
template <typename V, int COUNT>
void weigh(float* y, const float* weights, const float* values, int64_t n, int64_t width,
           float share) {
    V sums[COUNT];
    constexpr int64_t EACH = static_cast<int64_t>(sizeof(V) / sizeof(float));
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; ++c) sums[c] = V(0.0f);
    for (int64_t s = 0; s < n; ++s) {
        const V weight(weights[s]);
#pragma GCC unroll 8
        for (int c = 0; c < COUNT; ++c) {
            V value;
            load(value, values + s * width + c * EACH);
            sums[c] = fused(weight, value, sums[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < COUNT; ++c) store(y + c * EACH, sums[c] * V(share));
}

void weighted_sum(float* y, const float* weights, const float* values, int64_t n, int64_t width,
                  float share) {
    using V = Wide<float>;
    int64_t i = 0;
    for (; i + 4 * V::N <= width; i += 4 * V::N)
        weigh<V, 4>(y + i, weights, values + i, n, width, share);
    for (; i + V::N <= width; i += V::N) weigh<V, 1>(y + i, weights, values + i, n, width, share);
    for (; i < width; ++i) weigh<float, 1>(y + i, weights, values + i, n, width, share);
}

}  // namespace

void token_attention_kernel(const TokenAttention& all, int64_t first, int64_t last,
                            float* scratch) {
    const int64_t width = all.width, each = all.heads / all.groups;
    float *const query = scratch, *const scores = scratch + width;
    for (int64_t piece = first; piece < last; ++piece) {
        const int64_t row = piece / all.groups, group = piece % all.groups, place = all.places[row];
        float* const keys = all.keys + piece * all.room * width;
        float* const values = all.values + piece * all.room * width;
        turn_head(all, keys + place * width, all.k.data + row * all.k.row + group * all.k.head,
                  row);
        memcpy(values + place * width, all.v.data + row * all.v.row + group * all.v.head,
               static_cast<size_t>(width) * sizeof(float));
        for (int64_t head = group * each; head < (group + 1) * each; ++head) {
            turn_head(all, query, all.q.data + row * all.q.row + head * all.q.head, row);
            const int64_t n = place + 1;
            const float largest =
                scores_of(scores, query, keys, n, width, static_cast<float>(all.scale));
            const float total = exponentials(scores, n, softmax_shift(largest));
            weighted_sum(all.y + (row * all.heads + head) * width, scores, values, n, width,
                         1.0f / total);
        }
    }
}

}  // namespace pyops::PYOPS_ISA
