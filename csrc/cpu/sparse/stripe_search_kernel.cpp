// The divisions of windows of two stripes (math/sparse/stripe_search.h). A lane is a window, so
// that the sum of each goes over the rows in their order, whatever the register:
//
//   two largest of {a, b, c, d}   from larger and smaller of (a, b) and of (c, d)
//                                 max(l1, l2) + max(min(l1, l2), max(s1, s2))
#include "../../math/sparse/stripe_search.h"
#include "../isa.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))

constexpr StripeTable TABLE = stripe_table();
constexpr int64_t ROWS = 64;  // of a tile: the lanes' columns lie side by side in 16 KiB

#if defined(__AVX512F__)
struct Lanes {
    __m512d x;
    static PYOPS_INLINE Lanes of(const double* p) { return {_mm512_loadu_pd(p)}; }
    static PYOPS_INLINE Lanes all(double a) { return {_mm512_set1_pd(a)}; }
    PYOPS_INLINE void put(double* p) const { _mm512_storeu_pd(p, x); }
};
inline PYOPS_INLINE Lanes larger(Lanes a, Lanes b) { return {_mm512_max_pd(a.x, b.x)}; }
inline PYOPS_INLINE Lanes smaller(Lanes a, Lanes b) { return {_mm512_min_pd(a.x, b.x)}; }
inline PYOPS_INLINE Lanes sum(Lanes a, Lanes b) { return {_mm512_add_pd(a.x, b.x)}; }
#elif defined(__AVX2__)
struct Lanes {
    __m256d x, y;
    static PYOPS_INLINE Lanes of(const double* p) {
        return {_mm256_loadu_pd(p), _mm256_loadu_pd(p + 4)};
    }
    static PYOPS_INLINE Lanes all(double a) { return {_mm256_set1_pd(a), _mm256_set1_pd(a)}; }
    PYOPS_INLINE void put(double* p) const {
        _mm256_storeu_pd(p, x);
        _mm256_storeu_pd(p + 4, y);
    }
};
inline PYOPS_INLINE Lanes larger(Lanes a, Lanes b) {
    return {_mm256_max_pd(a.x, b.x), _mm256_max_pd(a.y, b.y)};
}
inline PYOPS_INLINE Lanes smaller(Lanes a, Lanes b) {
    return {_mm256_min_pd(a.x, b.x), _mm256_min_pd(a.y, b.y)};
}
inline PYOPS_INLINE Lanes sum(Lanes a, Lanes b) {
    return {_mm256_add_pd(a.x, b.x), _mm256_add_pd(a.y, b.y)};
}
#else
struct Lanes {
    double x[STRIPE_LANES];
    static PYOPS_INLINE Lanes of(const double* p) {
        Lanes found;
        memcpy(found.x, p, sizeof found.x);
        return found;
    }
    static PYOPS_INLINE Lanes all(double a) {
        Lanes found;
        for (double& x : found.x) x = a;
        return found;
    }
    PYOPS_INLINE void put(double* p) const { memcpy(p, x, sizeof x); }
};
template <typename F>
inline PYOPS_INLINE Lanes each(Lanes a, Lanes b, const F& f) {
    Lanes found;
    for (int i = 0; i < STRIPE_LANES; ++i) found.x[i] = f(a.x[i], b.x[i]);
    return found;
}
inline PYOPS_INLINE Lanes larger(Lanes a, Lanes b) {
    return each(a, b, [](double x, double y) PYOPS_INLINE { return x > y ? x : y; });
}
inline PYOPS_INLINE Lanes smaller(Lanes a, Lanes b) {
    return each(a, b, [](double x, double y) PYOPS_INLINE { return x < y ? x : y; });
}
inline PYOPS_INLINE Lanes sum(Lanes a, Lanes b) {
    return each(a, b, [](double x, double y) PYOPS_INLINE { return x + y; });
}
#endif

// Adds the two largest of every subset of a row to the subsets' sums, [SUBSETS][STRIPE_LANES].
inline PYOPS_INLINE void add_row(const Lanes* columns, double* sums) {
    Lanes large[COLUMN_PAIRS], small[COLUMN_PAIRS];
    for (int p = 0; p < COLUMN_PAIRS; ++p) {
        const Lanes a = columns[TABLE.pairs[p][0]], b = columns[TABLE.pairs[p][1]];
        large[p] = larger(a, b);
        small[p] = smaller(a, b);
    }
    for (int s = 0; s < SUBSETS; ++s) {
        const int p = TABLE.first[s], q = TABLE.second[s];
        const Lanes first = larger(large[p], large[q]);
        const Lanes second = larger(smaller(large[p], large[q]), larger(small[p], small[q]));
        double* const total = sums + s * STRIPE_LANES;
        sum(Lanes::of(total), sum(first, second)).put(total);
    }
}

}  // namespace

void stripe_windows_kernel(const StripeWindows& windows, StripeGain* gains) {
    double sums[SUBSETS * STRIPE_LANES] = {}, tile[ROWS * STRIPE * STRIPE_LANES];
    const int64_t rows = windows.rows;
    for (int64_t begin = 0; begin < rows; begin += ROWS) {
        const int64_t count = rows - begin < ROWS ? rows - begin : ROWS;
        for (int lane = 0; lane < STRIPE_LANES; ++lane)
            for (int c = 0; c < STRIPE; ++c) {
                const int64_t channel = windows.order[windows.others[lane] * STRIPE + c];
                const double* const from = windows.columns + channel * rows + begin;
                for (int64_t r = 0; r < count; ++r)
                    tile[(r * STRIPE + c) * STRIPE_LANES + lane] = from[r];
            }
        const double* own[STRIPE];
        for (int c = 0; c < STRIPE; ++c)
            own[c] = windows.columns + windows.order[windows.stripe * STRIPE + c] * rows + begin;
        for (int64_t r = 0; r < count; ++r) {
            Lanes columns[WINDOW];
            for (int c = 0; c < STRIPE; ++c) {
                columns[c] = Lanes::all(own[c][r]);
                columns[STRIPE + c] = Lanes::of(tile + (r * STRIPE + c) * STRIPE_LANES);
            }
            add_row(columns, sums);
        }
    }
    for (int lane = 0; lane < STRIPE_LANES; ++lane) {
        const auto kept = [&](int d) {
            return sums[d * STRIPE_LANES + lane] + sums[(SUBSETS - 1 - d) * STRIPE_LANES + lane];
        };
        int best = 0;
        for (int d = 1; d < DIVISIONS; ++d)
            if (kept(d) > kept(best)) best = d;
        gains[lane] = {kept(best) - kept(0), best};
    }
}

}  // namespace pyops::PYOPS_ISA
