// A stretch of fp32 numbers that shares a scale: its largest magnitude, and its codes.
#pragma once
#include "../../math/communication/quantize.h"
#include "../isa.h"

namespace pyops::PYOPS_ISA {
namespace {

// The bits of the largest magnitude: as integers they are in the order of the numbers, and above
// all of them are inf and nan.
inline uint32_t largest_of(const float* u, int64_t n, uint32_t so_far) {
    int32_t largest = static_cast<int32_t>(so_far);
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const int32_t magnitude = static_cast<int32_t>(bits_of(u[i]) & 0x7FFFFFFFu);
        largest = magnitude > largest ? magnitude : largest;
    }
    return static_cast<uint32_t>(largest);
}

template <int FORMAT>
void to_codes(uint8_t* __restrict codes, const float* __restrict u, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i)
        codes[i] = quantize_code<FORMAT>(quantize_ratio<FORMAT>(u[i], scale));
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
