// What the kernels around an int8 product are told: rows of numbers with a scale for each, and rows
// of int32 sums.
#pragma once
#include <cstdint>

namespace pyops {

struct QuantizedRows {
    const void* x;
    int dtype;  // of x: fp32, bf16 or fp16
    int64_t width;
    bool symmetric;
    uint8_t* codes;           // [rows, width]; null: only the extents are wanted
    float* scales;            // [rows]
    int32_t* zeros;           // [rows]; null: symmetric
    float *lowest, *highest;  // [rows], if only the extents are wanted
    const float* given;       // scales found beforehand; null: they are found here
    const int32_t* given_zeros;
    int64_t given_stride;  // 0: one for all rows
};

struct ScaledSums {
    const int32_t* acc;  // [rows, width]
    void* out;           // [rows, width], fp32, bf16 or fp16
    const float* row_scales;
    int64_t row_stride;                 // 0: one for all rows
    const float *column_scales, *bias;  // [width]; bias: null where there is none
    const int32_t *row_zeros, *sums;    // [rows] and [width]; null: symmetric
    int64_t width;
    int dtype, activation;  // activation: a code of math/layers/activation.h, or -1
};

}  // namespace pyops
