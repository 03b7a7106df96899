// What the kernel of a linear layer of int8 codes is told.
#pragma once
#include "scaled.h"

namespace pyops {

constexpr int64_t PANEL = 32;  // outputs whose weights are laid out together

struct Int8Linear {
    const int8_t* a;       // [rows, inner]
    const int8_t* weight;  // [outputs, inner]
    int64_t rows, inner, outputs;
    ScaledSums sums;  // what becomes of the int32 sums; width: outputs
    bool vnni;        // the machine multiplies four bytes and adds them up in one instruction
};

// Bytes that a call of the kernel wants as scratch.
inline int64_t int8_linear_scratch(const Int8Linear& layer) {
    return (layer.inner + 3) / 4 * 4 * PANEL + 64;
}

}  // namespace pyops
