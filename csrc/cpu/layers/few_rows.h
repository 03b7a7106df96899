// What the kernel of the product of a few rows with a matrix is told.
#pragma once
#include <cstdint>

namespace pyops {

struct FewRows {
    const void* x;       // [rows, width], of `dtype` as all the others
    const void* weight;  // [outputs, width]
    const void* bias;    // [outputs], or null
    void* y;             // [rows, outputs]
    int64_t rows, width, outputs;
    int dtype;
};

}  // namespace pyops
