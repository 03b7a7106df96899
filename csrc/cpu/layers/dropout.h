// What the kernels of bias_dropout_add, dropout and their derivatives are told.
#pragma once
#include "../rows/row_tile.h"

namespace pyops {

struct DropoutSpan {
    const void* x;         // backward: dy
    const void* residual;  // null: none
    const void* bias;      // fp32 (float64 for float64) of `columns`; null: none
    void* out;             // null: only sums are wanted
    int64_t columns;
    int dtype;
    bool drops;  // false: nothing is dropped or scaled
    float p;
    double scale;  // of what is kept: 1 / (1 - p)
    uint64_t key;
};

}  // namespace pyops
