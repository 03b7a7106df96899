// Around an int8 product: rows to codes before it, int32 sums to numbers after it. A row stays in
// the caches between the pass that finds its scale and the one that uses it.
#include "coded_row.h"
#include "../rows/finish_row.h"
#include "scale_row.h"

namespace pyops::PYOPS_ISA {
namespace {

// Bits of a number as an integer in the order of the numbers, and back: -nan < -inf < ... < nan.
inline int32_t ordered(int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); }

struct Extent {
    float low, high;  // low <= 0 <= high; nan both where a number is not finite
};

Extent extent_of(const float* u, int64_t n) {
    int32_t low = 0, high = 0;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const int32_t key = ordered(static_cast<int32_t>(bits_of(u[i])));
        low = key < low ? key : low;
        high = key > high ? key : high;
    }
    constexpr int32_t INFINITE = 0x7F800000;
    if (high >= INFINITE || low <= ordered(static_cast<int32_t>(0xFF800000u)))
        return {float_of(0x7FC00000u), float_of(0x7FC00000u)};
    return {float_of(static_cast<uint32_t>(ordered(low))),
            float_of(static_cast<uint32_t>(ordered(high)))};
}

Extent magnitude_of(const float* u, int64_t n) {
    const uint32_t largest = largest_of(u, n, 0);
    const float high = float_of(largest < 0x7F800000u ? largest : 0x7FC00000u);
    return {-high, high};
}

void affine_codes(uint8_t* __restrict codes, const float* __restrict u, int64_t n, float scale,
                  float zero) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) codes[i] = affine_code(u[i], scale, zero);
}

void quantize_row(const QuantizedRows& rows, int64_t r, const float* u, const Extent& extent) {
    float scale = rows.symmetric ? quantize_scale<INT8>(bits_of(extent.high))
                                 : affine_scale(extent.low, extent.high);
    float zero = rows.symmetric ? 0.0f : affine_zero(extent.low, scale);
    if (rows.given) {
        const int64_t at = r * rows.given_stride;
        scale = extent.high == extent.high ? rows.given[at] : extent.high;
        if (!rows.symmetric) zero = scale > 0.0f ? static_cast<float>(rows.given_zeros[at]) : 0.0f;
    }
    uint8_t* const codes = rows.codes + r * rows.width;
    rows.scales[r] = scale;
    if (rows.symmetric) {
        to_codes<INT8>(codes, u, rows.width, scale);
    } else {
        affine_codes(codes, u, rows.width, scale, zero);
        rows.zeros[r] = static_cast<int32_t>(zero);
    }
}

template <typename S>
void scale_rows(const ScaledSums& rows, int64_t first, int64_t last, float* scratch) {
    for (int64_t r = first; r < last; ++r) {
        S* const out = static_cast<S*>(rows.out) + r * rows.width;
        const int32_t* const acc = rows.acc + r * rows.width;
        float* row = scratch;
        if constexpr (sizeof(S) == sizeof(float)) {
            if (rows.out == rows.acc) {  // in place: read whole before it is written
                scale_row(row, acc, rows, r, 0, rows.width);
                memcpy(out, row, static_cast<size_t>(rows.width) * sizeof(float));
                continue;
            }
            row = out;
        }
        scale_row(row, acc, rows, r, 0, rows.width);
        finish_row(out, row, rows.width, rows.activation);
    }
}

}  // namespace

void quantize_rows_kernel(const QuantizedRows& rows, int64_t first, int64_t last, float* scratch) {
    for (int64_t r = first; r < last; ++r) {
        const float* const u =
            as_fp32(scratch, at(rows.x, r * rows.width, rows.dtype), rows.width, rows.dtype);
        const Extent extent =
            rows.symmetric ? magnitude_of(u, rows.width) : extent_of(u, rows.width);
        if (rows.codes) {
            quantize_row(rows, r, u, extent);
        } else {
            rows.lowest[r] = extent.low;
            rows.highest[r] = extent.high;
        }
    }
}

void scale_product_kernel(const ScaledSums& rows, int64_t first, int64_t last, float* scratch) {
    with_storage(rows.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        if constexpr (sizeof(S) < 8) scale_rows<S>(rows, first, last, scratch);
    });
}

}  // namespace pyops::PYOPS_ISA
