// The kernels' side of sums over rows (row_blocks.h): fp32 sums of a few rows in L1, then added to
// a block's float64 sums.
#pragma once
#include "row_tile.h"
#include "storage.h"

namespace pyops::PYOPS_ISA {
namespace {

template <typename V, typename W>
inline __attribute__((always_inline)) void add_to(W* sums, int64_t i, V a) {
    V sum;
    load(sum, sums + i);
    store(sums + i, sum + a);
}

template <typename W>
inline void add_up(double* to, const W* from, int64_t n) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) to[i] += static_cast<double>(from[i]);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
