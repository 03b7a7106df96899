// y = x W^T + b for a few rows of x. The time is that of reading W, which is read once:
//
//   W   rows o .. o + 7   | 16 numbers | 16 numbers | ...     eight streams, the next eight fetched
//   x   row r             | 16 numbers | 16 numbers | ...     stays in the first cache
//
// A number of y is the sum over one register's lanes, gone through from left to right, and of the
// rest: the same bits whatever the other rows and outputs are.
#include "few_rows.h"
#include "../rows/rows.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_INLINE __attribute__((always_inline))
#define PYOPS_UNROLL _Pragma("GCC unroll 8")

template <int ROWS, int OUTPUTS, typename S>
inline PYOPS_INLINE void products(const FewRows& all, int64_t row, int64_t output, int64_t ahead) {
    using T = Real<S>;
    using V = Wide<T>;
    const int64_t width = all.width;
    const S* const x = static_cast<const S*>(all.x) + row * width;
    const S* const weight = static_cast<const S*>(all.weight) + output * width;
    V wide[ROWS][OUTPUTS];
    T rest[ROWS][OUTPUTS] = {};
    PYOPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
        PYOPS_UNROLL
        for (int o = 0; o < OUTPUTS; ++o) wide[r][o] = V(T(0));
    }
    const auto add = [&](auto lane, int64_t k, auto& sums) PYOPS_INLINE {
        typename decltype(lane)::type in[ROWS], w;
        PYOPS_UNROLL
        for (int r = 0; r < ROWS; ++r) load(in[r], x + r * width + k);
        PYOPS_UNROLL
        for (int o = 0; o < OUTPUTS; ++o) {
            load(w, weight + o * width + k);
            PYOPS_UNROLL
            for (int r = 0; r < ROWS; ++r) sums[r][o] = fused(in[r], w, sums[r][o]);
        }
    };
    int64_t k = 0;
    for (; k + V::N <= width; k += V::N) {
        if (ahead) {
            PYOPS_UNROLL
            for (int o = 0; o < OUTPUTS; ++o) __builtin_prefetch(weight + (ahead + o) * width + k);
        }
        add(Lane<V>{}, k, wide);
    }
    for (; k < width; ++k) add(Lane<T>{}, k, rest);
    PYOPS_UNROLL
    for (int r = 0; r < ROWS; ++r) {
        PYOPS_UNROLL
        for (int o = 0; o < OUTPUTS; ++o) {
            T bias = 0;
            if (all.bias) load(bias, static_cast<const S*>(all.bias) + output + o);
            store(static_cast<S*>(all.y) + (row + r) * all.outputs + output + o,
                  sum_of(wide[r][o]) + rest[r][o] + bias);
        }
    }
}

// All rows, at most MOST at a time; the weights that they share stay in the caches meanwhile.
template <int MOST, int OUTPUTS, typename S>
void block(const FewRows& all, int64_t row, int64_t output, int64_t ahead) {
    for (; row + MOST <= all.rows; row += MOST)
        products<MOST, OUTPUTS, S>(all, row, output, row ? 0 : ahead);
    if constexpr (MOST > 1)
        if (row < all.rows) block<MOST - 1, OUTPUTS, S>(all, row, output, ahead);
}

template <int MOST, int OUTPUTS, typename S>
int64_t blocks(const FewRows& all, int64_t first, int64_t last) {
    for (; first + OUTPUTS <= last; first += OUTPUTS)
        block<MOST, OUTPUTS, S>(all, 0, first, first + 2 * OUTPUTS <= last ? OUTPUTS : 0);
    return first;
}

}  // namespace

void few_rows_kernel(const FewRows& all, int64_t first, int64_t last) {
    with_storage(all.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        if (all.rows == 1) first = blocks<1, 8, S>(all, first, last);
        first = blocks<4, 4, S>(all, first, last);
        blocks<4, 1, S>(all, first, last);
    });
}

}  // namespace pyops::PYOPS_ISA
