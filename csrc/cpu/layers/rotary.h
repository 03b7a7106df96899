// What the kernel of rotary is told. csrc/cpu/layers/rotary.cpp fills it.
#pragma once
#include <cstdint>

namespace pyops {

struct RotarySpan {
    const void* x;  // [B, T, H, K], the last dimension without gaps
    void* out;      // the same, contiguous
    const float *cos, *sin;
    int64_t stride[3];      // of x: B, T, H, in elements
    int64_t T, H, K, half;  // half: pairs that are turned
    int64_t table_stride;   // from one sequence's tables to the next one's; 0: one for all
    int dtype;
    bool interleaved, inverse;
};

}  // namespace pyops
