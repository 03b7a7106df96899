// Rows of a sparse matrix times x: eight registers of a row of the result are summed up while the
// row's values go by, each broadcast, in their order.
//
//   out[r, n .. n + 8 registers] = sum over values v of row r, column c:  v x[c, n .. ]
#include "csr_product.h"
#include "../rows/rows.h"

namespace pyops::PYOPS_ISA {
namespace {

// `R` registers V of the columns from `n` on.
template <int R, typename V, typename T>
inline __attribute__((always_inline)) void product(const CsrSpan& span, int64_t row, int64_t n) {
    constexpr int64_t N = static_cast<int64_t>(sizeof(V) / sizeof(T));
    const T* const values = static_cast<const T*>(span.values);
    const T* const x = static_cast<const T*>(span.x) + n;
    V sums[R];
    for (int r = 0; r < R; ++r) sums[r] = V(T(0));
    for (int64_t i = span.starts[row]; i < span.starts[row + 1]; ++i) {
        const V value(values[i]);
        const T* const from = x + span.columns[i] * span.width;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            V a;
            load(a, from + r * N);
            sums[r] = fused(value, a, sums[r]);
        }
    }
    T* const out = static_cast<T*>(span.out) + row * span.width + n;
    for (int r = 0; r < R; ++r) store(out + r * N, sums[r]);
}

// Columns block by block, so that a block of x stays in the caches for all rows.
template <typename T>
void products(const CsrSpan& span, int64_t first, int64_t last) {
    using V = Wide<T>;
    int64_t n = 0;
    for (; n + 8 * V::N <= span.width; n += 8 * V::N)
        for (int64_t row = first; row < last; ++row) product<8, V, T>(span, row, n);
    for (; n + V::N <= span.width; n += V::N)
        for (int64_t row = first; row < last; ++row) product<1, V, T>(span, row, n);
    for (; n < span.width; ++n)
        for (int64_t row = first; row < last; ++row) product<1, T, T>(span, row, n);
}

}  // namespace

void csr_product_kernel(const CsrSpan& span, int64_t first, int64_t last) {
    (span.float64 ? products<double> : products<float>)(span, first, last);
}

}  // namespace pyops::PYOPS_ISA
