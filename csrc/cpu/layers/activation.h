// What the kernels of bias_activation and bias_gated are told: matrices of one dtype, and the bias
// in fp32.
#pragma once
#include "../rows/row_tile.h"

namespace pyops {

struct ActivationSpan {
    const void *dy, *x;
    void* out;  // y, or dx
    // Fp32 (float64 for float64), zeros where there is none; gated: of gate, then of up
    const void* bias;
    int64_t columns;        // of y and dy; gated: x and dx have twice as many, gate | up
    int dtype, activation;  // activation: a code of math/layers/activation.h
    bool gated;
};

}  // namespace pyops
