// Statistics of rows of logits, and their gradient: one reading of a row each, tile by tile.
// Compute is fp32, fp64 for fp64.
//
//   tile of a row -> its maximum -> larger than before? scale the sum so far
//                 -> add exp(z - maximum) of the tile
//
// Within a tile, sums run in LANES places at once, which are then folded in halves: an order that
// depends on the columns alone.
#include "logits.h"
#include "../rows/storage.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t LANES = 64;

// Folds f(lanes' values so far, position in the row's tile) over a tile.
template <typename S, typename T, typename F>
inline __attribute__((always_inline)) void over_lanes(const S* z, int64_t n, T* lanes, const F& f) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for_each_of<S>(LANES, [=](auto lane, int64_t j) __attribute__((always_inline)) {
            typename decltype(lane)::type x, so_far;
            load(x, z + i + j);
            load(so_far, lanes + j);
            store(lanes + j, f(so_far, x));
        });
    for_each_of<S>(n - i, [=](auto lane, int64_t j) __attribute__((always_inline)) {
        typename decltype(lane)::type x, so_far;
        load(x, z + i + j);
        load(so_far, lanes + j);
        store(lanes + j, f(so_far, x));
    });
}

template <typename T>
T folded_sum(T* lanes) {
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    return lanes[0];
}

// The largest number of a tile; a nan among them is passed over here and turns up in the sum.
template <typename S, typename T>
T tile_maximum(const S* z, int64_t n) {
    alignas(64) T lanes[LANES];
    for (T& lane : lanes) lane = T(-INFINITY);
    over_lanes(z, n, lanes, [](auto so_far, auto x) __attribute__((always_inline)) {
        return at_least(so_far, x);
    });
    T found = lanes[0];
    for (const T lane : lanes) found = lane > found ? lane : found;
    return found;
}

template <typename S, typename T>
T tile_exponentials(const S* z, int64_t n, T shift) {
    alignas(64) T lanes[LANES] = {};
    over_lanes(z, n, lanes, [=](auto so_far, auto x) __attribute__((always_inline)) {
        return so_far + exponential(x - decltype(x)(shift));
    });
    return folded_sum(lanes);
}

template <typename S, typename T>
T tile_sum(const S* z, int64_t n, T shift) {
    alignas(64) T lanes[LANES] = {};
    over_lanes(z, n, lanes, [=](auto so_far, auto x) __attribute__((always_inline)) {
        return so_far + (x - decltype(x)(shift));
    });
    return folded_sum(lanes);
}

template <typename S>
Real<S> at_column(const S* z, int64_t column) {
    Real<S> value;
    load(value, z + column);
    return value;
}

// What to subtract so that no exponential overflows; nothing from a row of -inf.
template <typename T>
T shift_of(T maximum) {
    return maximum == T(-INFINITY) ? T(0) : maximum;
}

template <typename S, typename T>
void row_statistics(const S* z, const LogitRows& rows, int64_t target, bool with_sum, T* out) {
    T maximum = T(-INFINITY);
    double total = 0.0, shifted = 0.0;
    for (int64_t start = 0; start < rows.columns; start += TILE) {
        const int64_t n = rows.columns - start < TILE ? rows.columns - start : TILE;
        const T here = tile_maximum<S, T>(z + start, n);
        if (here > maximum) {
            total *= static_cast<double>(exponential(maximum - here));
            maximum = here;
        }
        const T shift = shift_of(maximum);
        total += static_cast<double>(tile_exponentials(z + start, n, shift));
        if (with_sum)
            shifted +=
                static_cast<double>(tile_sum(z + start, n, shift)) + static_cast<double>(n) * shift;
    }
    out[0] = maximum;
    out[1] = static_cast<T>(total);
    out[2] = target < 0 ? T(0) : at_column(z, target);
    if (with_sum)
        out[3] = static_cast<T>(shifted - static_cast<double>(rows.columns) * shift_of(maximum));
}

template <typename S>
void statistics(const LogitRows& rows, bool with_sum, void* out, int64_t begin, int64_t end) {
    using T = Real<S>;
    const int64_t width = with_sum ? 4 : 3;
    for (int64_t row = begin; row < end; ++row) {
        T* const result = static_cast<T*>(out) + row * width;
        if (rows.targets[row] == rows.ignore_index) {
            for (int64_t k = 0; k < width; ++k) result[k] = T(k == 1);
            continue;
        }
        row_statistics(static_cast<const S*>(rows.logits) + row * rows.stride, rows,
                       rows.column_of(row), with_sum, result);
    }
}

template <typename S>
void gradient(const LogitRows& rows, void* out, int64_t out_stride, const void* maxima,
              const void* coefficients, int64_t begin, int64_t end) {
    using T = Real<S>;
    for (int64_t row = begin; row < end; ++row) {
        const S* const z = static_cast<const S*>(rows.logits) + row * rows.stride;
        S* const result = static_cast<S*>(out) + row * out_stride;
        if (rows.targets[row] == rows.ignore_index) {
            memset(static_cast<void*>(result), 0,
                   static_cast<size_t>(rows.columns + rows.padding) * sizeof(S));
            continue;
        }
        const T shift = shift_of(static_cast<const T*>(maxima)[row]);
        const T* const c = static_cast<const T*>(coefficients) + 3 * row;
        const T factor = c[0], uniform = c[2];
        const int64_t target = rows.column_of(row);
        T at_target = T(0);
        if (target >= 0)
            at_target = fused(factor, exponential(at_column(z, target) - shift), uniform + c[1]);
        for_each_of<S>(rows.columns, [=](auto lane, int64_t i) __attribute__((always_inline)) {
            using V = typename decltype(lane)::type;
            V x;
            load(x, z + i);
            store(result + i, fused(V(factor), exponential(x - V(shift)), V(uniform)));
        });
        if (target >= 0) store(result + target, at_target);
        memset(static_cast<void*>(result + rows.columns), 0,
               static_cast<size_t>(rows.padding) * sizeof(S));
    }
}

}  // namespace

void cross_entropy_statistics_kernel(const LogitRows& rows, bool with_sum, void* out, int64_t begin,
                                     int64_t end) {
    with_storage(rows.dtype, [&](auto storage) {
        statistics<typename decltype(storage)::type>(rows, with_sum, out, begin, end);
    });
}

void cross_entropy_gradient_kernel(const LogitRows& rows, void* out, int64_t out_stride,
                                   const void* maxima, const void* coefficients, int64_t begin,
                                   int64_t end) {
    with_storage(rows.dtype, [&](auto storage) {
        gradient<typename decltype(storage)::type>(rows, out, out_stride, maxima, coefficients,
                                                   begin, end);
    });
}

}  // namespace pyops::PYOPS_ISA
