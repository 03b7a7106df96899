// Fake quantization, forward and backward: one load and one store a number, whatever shares a
// scale. Sums for the scales are added in float64 by SUMS numbers side by side, so that their bits
// are those of every instruction set.
#include "fake_quantize.h"

#include "../../math/layers/fake_quantize.h"
#include "../rows/row_sums.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))

constexpr int64_t SUMS = 16;

// A run's scale, the same for all of its numbers, and the ends of its range.
template <typename T>
struct RunScale {
    T scale, low, high;

    RunScale(const FakeQuantizeSpan& span, int64_t channel) {
        scale = static_cast<const T*>(span.scale)[channel];
        const T zero = span.zero ? static_cast<const T*>(span.zero)[channel] : T(0);
        low = static_cast<T>(span.low) - zero;
        high = static_cast<T>(span.high) - zero;
    }
    template <typename V>
    PYOPS_INLINE Steps<V> steps(V x, int64_t) const {
        return Steps<V>(x, V(scale), V(low), V(high));
    }
    template <typename V>
    PYOPS_INLINE V at(int64_t) const {
        return V(scale);
    }
};

// The scales of neighbors, one for each.
template <typename T>
struct RowScale {
    const T *scales, *zeros;  // zeros: null where there are none
    T low, high;

    RowScale(const FakeQuantizeSpan& span, int64_t channel)
        : scales(static_cast<const T*>(span.scale) + channel),
          zeros(span.zero ? static_cast<const T*>(span.zero) + channel : nullptr),
          low(static_cast<T>(span.low)), high(static_cast<T>(span.high)) {}
    template <typename V>
    PYOPS_INLINE V at(int64_t i) const {
        V scale;
        load(scale, scales + i);
        return scale;
    }
    template <typename V>
    PYOPS_INLINE Steps<V> steps(V x, int64_t i) const {
        V zero(T(0));
        if (zeros) load(zero, zeros + i);
        return Steps<V>(x, at<V>(i), V(low) - zero, V(high) - zero);
    }
};

template <typename S, typename Scale>
inline void forward_numbers(S* y, const S* x, int64_t n, const Scale& scale) {
    for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
        using V = typename decltype(lane)::type;
        V a;
        load(a, x + i);
        store(y + i, scale.template steps<V>(a, i).value(scale.template at<V>(i)));
    });
}

// dx, unless null, and the summands of the scales' gradients, unless null.
template <typename S, typename Scale>
inline void backward_numbers(S* dx, Real<S>* summands, const S* dy, const S* x, int64_t n,
                             const Scale& scale) {
    for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
        using V = typename decltype(lane)::type;
        V a, g;
        load(a, x + i);
        load(g, dy + i);
        const Steps<V> steps = scale.template steps<V>(a, i);
        if (dx) store(dx + i, steps.of_input(g));
        if (summands) store(summands + i, steps.of_scale(g));
    });
}

// Adds number i to sum i % SUMS.
template <typename T>
inline void add_by_turns(double* __restrict sums, const T* __restrict from, int64_t n) {
    int64_t i = 0;
    for (; i + SUMS <= n; i += SUMS)
        for (int64_t k = 0; k < SUMS; ++k) sums[k] += static_cast<double>(from[i + k]);
    for (int64_t k = 0; i + k < n; ++k) sums[k] += static_cast<double>(from[i + k]);
}

// A piece of a run: dx, and the sum of its summands.
template <typename S>
double backward_piece(const FakeQuantizeSpan& span, int64_t start, int64_t n, int64_t channel,
                      bool summed) {
    using T = Real<S>;
    const RunScale<T> scale(span, channel);
    const S *const x = static_cast<const S*>(span.x) + start, *const dy =
                                                                  static_cast<const S*>(span.dy) +
                                                                  start;
    S* const dx = span.out ? static_cast<S*>(span.out) + start : nullptr;
    if (!summed) {
        backward_numbers(dx, static_cast<T*>(nullptr), dy, x, n, scale);
        return 0.0;
    }
    T summands[TILE];
    double sums[SUMS] = {};
    for (int64_t done = 0; done < n; done += TILE) {
        const int64_t count = n - done < TILE ? n - done : TILE;
        backward_numbers(dx ? dx + done : nullptr, summands, dy + done, x + done, count, scale);
        add_by_turns(sums, summands, count);
    }
    for (int64_t half = SUMS / 2; half > 0; half /= 2)
        for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
}

}  // namespace

void fake_quantize_kernel(const FakeQuantizeSpan& span, int64_t begin, int64_t end) {
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        const S* const x = static_cast<const S*>(span.x);
        S* const y = static_cast<S*>(span.out);
        const bool runs = span.inner > 1;
        const int64_t stretch = runs ? span.inner : span.channels;
        for (int64_t i = begin; i < end;) {
            const int64_t place = i % stretch,
                          n = end - i < stretch - place ? end - i : stretch - place;
            if (runs)
                forward_numbers(y + i, x + i, n,
                                RunScale<Real<S>>(span, i / stretch % span.channels));
            else
                forward_numbers(y + i, x + i, n, RowScale<Real<S>>(span, place));
            i += n;
        }
    });
}

void fake_quantize_backward_kernel(const FakeQuantizeSpan& span, int64_t first, int64_t last,
                                   double* sums) {
    const int64_t pieces = span.pieces();
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        for (int64_t p = first; p < last; ++p) {
            const int64_t run = p / pieces, start = p % pieces * FAKE_QUANTIZE_PIECE;
            const int64_t n =
                span.inner - start < FAKE_QUANTIZE_PIECE ? span.inner - start : FAKE_QUANTIZE_PIECE;
            const double sum = backward_piece<S>(span, run * span.inner + start, n,
                                                 run % span.channels, sums != nullptr);
            if (sums) sums[p] = sum;
        }
    });
}

void fake_quantize_columns_kernel(const FakeQuantizeSpan& span, const RowTile& tile, double* sums) {
    const int64_t n = tile.end - tile.begin;
    with_storage(span.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        using T = Real<S>;
        const RowScale<T> scale(span, tile.begin);
        T summands[SUM_COLUMNS];
        for (int64_t row = tile.first; row < tile.last; ++row) {
            const int64_t start = row * span.channels + tile.begin;
            S* const dx = span.out ? static_cast<S*>(span.out) + start : nullptr;
            backward_numbers(dx, sums ? summands : nullptr, static_cast<const S*>(span.dy) + start,
                             static_cast<const S*>(span.x) + start, n, scale);
            if (sums) add_up(sums + tile.begin, summands, n);
        }
    });
}

}  // namespace pyops::PYOPS_ISA
