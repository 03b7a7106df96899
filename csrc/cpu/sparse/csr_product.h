// What the kernel of a sparse product is told: a matrix [rows, inputs] by its rows' nonzeros, and x
// [inputs, width], all of one dtype, fp32 or float64.
#pragma once
#include <cstdint>

namespace pyops {

struct CsrSpan {
    const int64_t* starts;   // [rows + 1]
    const int32_t* columns;  // of each value
    const void *values, *x;
    void* out;  // [rows, width]
    int64_t width;
    bool float64;
};

}  // namespace pyops
