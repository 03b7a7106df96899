// Layer norm and root-mean-square norm, forward and backward, for each instruction set. A row is
// read from memory once; it stays in L1 for the passes over it: sum and mean, squared distances,
// result.
#include <type_traits>

#include "../rows/rows.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))

// The statistics of a row, and the row in T at `row` for the pass that writes: the input or the sum
// itself where it is T.
template <bool RMS, bool ADD, bool COPIES, typename S, typename Out, typename T>
RowStatistics<T> statistics_of(const S* x, const S* residual, Out* sum, T* row, int64_t n, T eps) {
    Sums<T> first;
    across<T>(n, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
        typename decltype(lane)::type a, b;
        load(a, x + i);
        if constexpr (ADD) {
            load(b, residual + i);
            a = a + b;
            store(sum + i, a);
            if constexpr (sizeof(S) != sizeof(T)) load(a, sum + i);  // as it was rounded
        }
        if (COPIES) store(row + i, a);
        if (RMS)
            first.add_product(a, a, slot);
        else
            first.add(a, slot);
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
    return RowStatistics<T>::of_layer(centre, distances.total(), squares.total(), static_cast<T>(n),
                                      eps);
}

template <bool RMS, bool BIAS, typename Out, typename T>
void write_row(Out* y, const T* row, const T* scale, const T* bias,
               const RowStatistics<T>& statistics, int64_t n) {
    along<T>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
        typename decltype(lane)::type a, w, b;
        load(a, row + i);
        load(w, scale + i);
        a = normalised<RMS>(a, statistics);
        if constexpr (BIAS) {
            load(b, bias + i);
            store(y + i, fused(a, w, b));
        } else {
            store(y + i, a * w);
        }
    });
}

inline const double* as_computed(double*, const void* from, int64_t, int) {
    return static_cast<const double*>(from);
}
inline const float* as_computed(float* scratch, const void* from, int64_t n, int dtype) {
    return as_fp32(scratch, from, n, dtype);
}

// A row of x or of the residual in the result's dtype S: where it is, or widened when x and
// residual differ and S is fp32.
template <typename S, typename T>
const S* operand(T* scratch, const void* base, int64_t start, int64_t n, int dtype) {
    if constexpr (sizeof(S) == sizeof(T))
        return as_computed(scratch, at(base, start, dtype), n, dtype);
    else
        return static_cast<const S*>(base) + start;
}

template <typename S, typename Out, bool RMS, bool ADD>
void forward(const NormRows& p, int64_t begin, int64_t end, void* scratch) {
    using T = Real<S>;
    constexpr bool COPIES =
        sizeof(S) != sizeof(T) || (ADD && std::is_same<Out, StreamedFloat>::value);
    const int64_t n = p.width;
    T* const spare = static_cast<T*>(scratch);
    const T *const scale = static_cast<const T*>(p.scale), *const bias =
                                                               static_cast<const T*>(p.bias);
    for (int64_t r = begin; r < end; ++r) {
        const S* const x = operand<S>(spare, p.x, r * n, n, p.x_dtype);
        const S* const residual =
            ADD ? operand<S>(spare + n, p.residual, r * n, n, p.residual_dtype) : nullptr;
        Out* const sum = ADD ? static_cast<Out*>(p.sum) + r * n : nullptr;
        T* row = spare;  // x may be there too: a number is read before it is written
        // Only read from there
        if constexpr (!COPIES) row = ADD ? reinterpret_cast<T*>(sum) : const_cast<T*>(x);
        const auto statistics =
            statistics_of<RMS, ADD, COPIES>(x, residual, sum, row, n, static_cast<T>(p.eps));
        (bias ? write_row<RMS, true, Out, T>
              : write_row<RMS, false, Out, T>)(static_cast<Out*>(p.y) + r * n, row, scale, bias,
                                               statistics, n);
        static_cast<T*>(p.rstd)[r] = statistics.rstd;
        if (!RMS) static_cast<T*>(p.mean)[r] = statistics.mean();
    }
}

// R rows together: the sums of weight and bias are fetched and put back once for them.
template <typename S, typename Out, bool RMS, bool MORE, int R>
void backward_rows(const NormGradient& p, int64_t first, Real<S>* dscale, Real<S>* dbias) {
    using T = Real<S>;
    const int64_t n = p.width;
    const T* const scale = static_cast<const T*>(p.scale);
    const S* const dy = static_cast<const S*>(p.dy) + first * n;
    const S* const x = static_cast<const S*>(p.x) + first * n;
    const S* const dsum = MORE ? static_cast<const S*>(p.dsum) + first * n : nullptr;
    Out* const dx = static_cast<Out*>(p.dx) + first * n;
    RowGradient<T> rows[R];
    // In the same order for any R: a row's bits don't depend on its neighbours
    Sums<T, 2> sum_g[R], sum_gd[R];
    for (int r = 0; r < R; ++r) {
        rows[r].mean = RMS ? T(0) : static_cast<const T*>(p.mean)[first + r];
        rows[r].rstd = static_cast<const T*>(p.rstd)[first + r];
    }
    across<T>(n, [&](auto lane, int64_t i, int slot) PYOPS_INLINE {
        typename decltype(lane)::type g, d, w;
        load(w, scale + i);
        for (int r = 0; r < R; ++r) {
            load(g, dy + r * n + i);
            load(d, x + r * n + i);
            g = g * w;
            if (!RMS) sum_g[r].add(g, slot);
            sum_gd[r].add_product(g, rows[r].template centred<RMS>(d), slot);
        }
    });
    for (int r = 0; r < R; ++r)
        rows[r].finish(sum_g[r].total(), sum_gd[r].total(), static_cast<T>(n));
    along<T>(n, [&](auto lane, int64_t i) PYOPS_INLINE {
        using V = typename decltype(lane)::type;
        V w, weight_sum, bias_sum;
        load(w, scale + i);
        load(weight_sum, dscale + i);
        if (!RMS) load(bias_sum, dbias + i);
        for (int r = 0; r < R; ++r) {
            V g, d, more;
            load(g, dy + r * n + i);
            load(d, x + r * n + i);
            d = rows[r].template centred<RMS>(d);
            weight_sum = fused(g * V(rows[r].rstd), d, weight_sum);
            if (!RMS) bias_sum = bias_sum + g;
            if constexpr (MORE) {
                load(more, dsum + r * n + i);
                store(dx + r * n + i, rows[r].template gradient<RMS>(g * w, d, more));
            } else {
                store(dx + r * n + i, rows[r].template gradient<RMS>(g * w, d));
            }
        }
        store(dscale + i, weight_sum);
        if (!RMS) store(dbias + i, bias_sum);
    });
}

template <typename S, typename Out, bool RMS, bool MORE>
void backward(const NormGradient& p, int64_t begin, int64_t end, void* dscale, void* dbias) {
    using T = Real<S>;
    int64_t r = begin;
    // Short rows one at a time: more of them at once are more streams from memory than are fetched
    // ahead.
    const bool pairs = p.width * static_cast<int64_t>(sizeof(S)) >= 4096;
    for (; pairs && r + 2 <= end; r += 2)
        backward_rows<S, Out, RMS, MORE, 2>(p, r, static_cast<T*>(dscale), static_cast<T*>(dbias));
    for (; r < end; ++r)
        backward_rows<S, Out, RMS, MORE, 1>(p, r, static_cast<T*>(dscale), static_cast<T*>(dbias));
}

// Calls f(S{}, Out{}): how the dtype's numbers stand in memory, and how results are written.
template <typename F>
inline PYOPS_INLINE void with_storage(int dtype, bool streams, const F& f) {
    if (dtype == BF16)
        f(Bf16{}, Bf16{});
    else if (dtype == FP16)
        f(Fp16{}, Fp16{});
    else if (dtype == FP64)
        f(double{}, double{});
    else if (streams)
        f(float{}, StreamedFloat{});
    else
        f(float{}, float{});
}

// Whether rows may be written past the caches: each must begin where a register may.
bool aligned(const void* out, int64_t width) {
    return reinterpret_cast<uintptr_t>(out) % sizeof(Wide<float>) == 0 &&
           width % Wide<float>::N == 0;
}

}  // namespace

void norm_rows_kernel(const NormRows& p, int64_t begin, int64_t end, void* scratch) {
    const bool streams = p.streams && aligned(p.y, p.width) && aligned(p.sum, p.width);
    with_storage(p.dtype, streams, [&](auto storage, auto output) {
        using S = decltype(storage);
        using Out = decltype(output);
        if (p.rms)
            (p.residual ? forward<S, Out, true, true> : forward<S, Out, true, false>)(p, begin, end,
                                                                                      scratch);
        else
            (p.residual ? forward<S, Out, false, true>
                        : forward<S, Out, false, false>)(p, begin, end, scratch);
    });
    if (streams) fence_streams();
}

void norm_gradient_kernel(const NormGradient& p, int64_t begin, int64_t end, void* dscale,
                          void* dbias) {
    const bool streams = p.streams && aligned(p.dx, p.width);
    with_storage(p.dtype, streams, [&](auto storage, auto output) {
        using S = decltype(storage);
        using Out = decltype(output);
        if (p.rms)
            (p.dsum ? backward<S, Out, true, true> : backward<S, Out, true, false>)(p, begin, end,
                                                                                    dscale, dbias);
        else
            (p.dsum ? backward<S, Out, false, true>
                    : backward<S, Out, false, false>)(p, begin, end, dscale, dbias);
    });
    if (streams) fence_streams();
}

}  // namespace pyops::PYOPS_ISA
