// Stands in for CUDA's header: see cuda_runtime.h beside it. Rounding by csrc/math/round.h.
#pragma once
#include "../../../csrc/math/round.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {pyops::float_to_bf16(x)}; }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
