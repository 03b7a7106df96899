// Layer norm and root-mean-square norm, forward and backward, for each instruction set. A row is read from memory once; it stays in
// L1 for the passes over it: sum and mean, squared distances, result.
#include "rows.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))

// One row forward. `row`: where its numbers stand in T for the later passes: the input or the sum itself when they are T already.
template <typename S, bool RMS, bool ADD, typename T>
RowStatistics<T> statistics_of(const S* x, const S* residual, S* sum, T* row, int64_t n, T eps) {
    const bool copies = sizeof(S) != sizeof(T);
    Sums<T> first;
    across<T>(n, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
        typename decltype(lane)::type a, b;
        load(a, x + i);
        if (ADD) {
            load(b, residual + i);
            a = a + b;
            store(sum + i, a);
            if (copies) load(a, sum + i);  // as it was rounded
        }
        if (copies) store(row + i, a);
        if (RMS) first.add_product(a, a, slot);
        else first.add(a, slot);
    });
    if (RMS) return RowStatistics<T>::of_rms(first.total(), static_cast<T>(n), eps);
    const T centre = first.total() / static_cast<T>(n);
    Sums<T> distances, squares;
    across<T>(n, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
        using V = typename decltype(lane)::type;
        V a;
        load(a, row + i);
        a = a - V(centre);
        distances.add(a, slot);
        squares.add_product(a, a, slot);
    });
    return RowStatistics<T>::of_layer(centre, distances.total(), squares.total(), static_cast<T>(n), eps);
}

template <typename S, bool RMS, typename T>
void write_row(S* y, const T* row, const T* scale, const T* bias, const RowStatistics<T>& statistics, int64_t n) {
    if (bias)
        across<T>(n, [=](auto lane, int64_t i, int) PYOPS_INLINE {
            typename decltype(lane)::type a, w, b;
            load(a, row + i);
            load(w, scale + i);
            load(b, bias + i);
            store(y + i, fused(normalised<RMS>(a, statistics), w, b));
        });
    else
        across<T>(n, [=](auto lane, int64_t i, int) PYOPS_INLINE {
            typename decltype(lane)::type a, w;
            load(a, row + i);
            load(w, scale + i);
            store(y + i, normalised<RMS>(a, statistics) * w);
        });
}

inline const double* as_computed(double*, const void* from, int64_t, int) { return static_cast<const double*>(from); }
inline const float* as_computed(float* scratch, const void* from, int64_t n, int dtype) { return as_fp32(scratch, from, n, dtype); }

// A row of x or of the residual in the result's dtype S: where it is, or widened when x and residual differ and S is fp32.
template <typename S, typename T>
const S* operand(T* scratch, const void* base, int64_t start, int64_t n, int dtype) {
    if constexpr (sizeof(S) == sizeof(T)) return as_computed(scratch, at(base, start, dtype), n, dtype);
    else return static_cast<const S*>(base) + start;
}

template <typename S, bool RMS, bool ADD>
void forward(const NormRows& p, int64_t begin, int64_t end, void* scratch) {
    using T = typename Computed<S>::type;
    const int64_t n = p.width;
    T* const spare = static_cast<T*>(scratch);
    for (int64_t r = begin; r < end; ++r) {
        const S* const x = operand<S>(spare, p.x, r * n, n, p.x_dtype);
        const S* const residual = ADD ? operand<S>(spare + n, p.residual, r * n, n, p.residual_dtype) : nullptr;
        S* const sum = ADD ? static_cast<S*>(p.sum) + r * n : nullptr;
        T* row = spare;
        if constexpr (sizeof(S) == sizeof(T)) row = ADD ? sum : const_cast<S*>(x);  // read only
        const auto statistics = statistics_of<S, RMS, ADD, T>(x, residual, sum, row, n, static_cast<T>(p.eps));
        write_row<S, RMS, T>(static_cast<S*>(p.y) + r * n, row, static_cast<const T*>(p.scale), static_cast<const T*>(p.bias),
                             statistics, n);
        static_cast<T*>(p.rstd)[r] = statistics.rstd;
        if (!RMS) static_cast<T*>(p.mean)[r] = statistics.mean();
    }
}

// The means over a row of g = dy scale and of g h; the former only where it is used.
template <typename S, bool RMS, typename T>
void means_of(const S* dy, const S* x, const T* scale, const RowStatistics<T>& row, int64_t n, T* mean_g, T* mean_gh) {
    Sums<T> of_g, of_gh;
    across<T>(n, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
        typename decltype(lane)::type g, a, w;
        load(g, dy + i);
        load(a, x + i);
        load(w, scale + i);
        g = g * w;
        if (!RMS) of_g.add(g, slot);
        of_gh.add_product(g, normalised<RMS>(a, row), slot);
    });
    *mean_g = RMS ? T(0) : of_g.total() / static_cast<T>(n);
    *mean_gh = of_gh.total() / static_cast<T>(n);
}

// R rows together, so that the sums of weight and bias are fetched and put back once for all of them.
template <typename S, bool RMS, bool MORE, int R>
void backward_rows(const NormGradient& p, int64_t first, typename Computed<S>::type* dscale, typename Computed<S>::type* dbias) {
    using T = typename Computed<S>::type;
    const int64_t n = p.width;
    const T* const scale = static_cast<const T*>(p.scale);
    const S* const dy = static_cast<const S*>(p.dy) + first * n;
    const S* const x = static_cast<const S*>(p.x) + first * n;
    const S* const dsum = MORE ? static_cast<const S*>(p.dsum) + first * n : nullptr;
    S* const dx = static_cast<S*>(p.dx) + first * n;
    RowStatistics<T> rows[R];
    T mean_g[R], mean_gh[R];
    for (int r = 0; r < R; ++r) {
        rows[r] = {RMS ? T(0) : static_cast<const T*>(p.mean)[first + r], T(0), static_cast<const T*>(p.rstd)[first + r]};
        means_of<S, RMS, T>(dy + r * n, x + r * n, scale, rows[r], n, mean_g + r, mean_gh + r);
    }
    across<T>(n, [&](auto lane, int64_t i, int) PYOPS_INLINE {
        using V = typename decltype(lane)::type;
        V w, weight_sum, bias_sum;
        load(w, scale + i);
        load(weight_sum, dscale + i);
        if (!RMS) load(bias_sum, dbias + i);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            V g, a;
            load(g, dy + r * n + i);
            load(a, x + r * n + i);
            const V h = normalised<RMS>(a, rows[r]);
            weight_sum = fused(g, h, weight_sum);
            if (!RMS) bias_sum = bias_sum + g;
            V result = norm_gradient<RMS>(g * w, h, mean_g[r], mean_gh[r], rows[r].rstd);
            if (MORE) {
                load(a, dsum + r * n + i);
                result = result + a;
            }
            store(dx + r * n + i, result);
        }
        store(dscale + i, weight_sum);
        if (!RMS) store(dbias + i, bias_sum);
    });
}

template <typename S, bool RMS, bool MORE>
void backward(const NormGradient& p, int64_t begin, int64_t end, void* dscale, void* dbias) {
    using T = typename Computed<S>::type;
    int64_t r = begin;
    for (; r + 4 <= end; r += 4) backward_rows<S, RMS, MORE, 4>(p, r, static_cast<T*>(dscale), static_cast<T*>(dbias));
    for (; r < end; ++r) backward_rows<S, RMS, MORE, 1>(p, r, static_cast<T*>(dscale), static_cast<T*>(dbias));
}

// Calls f(S of the dtype's storage).
template <typename F>
inline PYOPS_INLINE void with_storage(int dtype, const F& f) {
    switch (dtype) {
        case BF16: return f(Bf16{});
        case FP16: return f(Fp16{});
        case FP64: return f(double{});
        default: return f(float{});
    }
}

}  // namespace

void norm_rows_kernel(const NormRows& p, int64_t begin, int64_t end, void* scratch) {
    with_storage(p.dtype, [&](auto storage) {
        using S = decltype(storage);
        if (p.rms) (p.residual ? forward<S, true, true> : forward<S, true, false>)(p, begin, end, scratch);
        else (p.residual ? forward<S, false, true> : forward<S, false, false>)(p, begin, end, scratch);
    });
}

void norm_gradient_kernel(const NormGradient& p, int64_t begin, int64_t end, void* dscale, void* dbias) {
    with_storage(p.dtype, [&](auto storage) {
        using S = decltype(storage);
        if (p.rms) (p.dsum ? backward<S, true, true> : backward<S, true, false>)(p, begin, end, dscale, dbias);
        else (p.dsum ? backward<S, false, true> : backward<S, false, false>)(p, begin, end, dscale, dbias);
    });
}

}  // namespace pyops::PYOPS_ISA
