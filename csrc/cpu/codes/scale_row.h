// From the int32 sums of a row, or of a stretch of it, to fp32 numbers.
#pragma once
#include "../isa.h"
#include "scaled.h"

namespace pyops::PYOPS_ISA {
namespace {

template <bool ZERO, bool BIAS>
inline void scale_row(float* __restrict out, const int32_t* __restrict acc, const ScaledSums& rows,
                      int64_t r, int64_t first, int64_t n) {
    const float scale = rows.row_scales[r * rows.row_stride];
    const uint32_t zero = ZERO ? static_cast<uint32_t>(rows.row_zeros[r * rows.row_stride]) : 0u;
    const int32_t* __restrict sums = ZERO ? rows.sums + first : nullptr;
    const float* __restrict columns = rows.column_scales + first;
    const float* __restrict bias = BIAS ? rows.bias + first : nullptr;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        uint32_t sum = static_cast<uint32_t>(acc[i]);
        if (ZERO) sum -= zero * static_cast<uint32_t>(sums[i]);
        const float value = static_cast<float>(static_cast<int32_t>(sum)) * scale * columns[i];
        out[i] = BIAS ? value + bias[i] : value;
    }
}

// Columns [first, first + n) of row r.
inline void scale_row(float* out, const int32_t* acc, const ScaledSums& rows, int64_t r,
                      int64_t first, int64_t n) {
    if (rows.row_zeros)
        (rows.bias ? scale_row<true, true> : scale_row<true, false>)(out, acc, rows, r, first, n);
    else
        (rows.bias ? scale_row<false, true> : scale_row<false, false>)(out, acc, rows, r, first, n);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
