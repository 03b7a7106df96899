// Stands in for CUDA's header: see cuda_runtime.h beside it. Rounding by csrc/math/round.h.
#pragma once
#include "../../../csrc/math/round.h"

struct __half {
    uint16_t bits;
};
inline __half __float2half_rn(float x) { return {pyops::float_to_fp16(x)}; }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half x) { return pyops::fp16_to_float(x.bits); }
