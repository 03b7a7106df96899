// What the kernel of token_attention_ is told. csrc/cpu/decoding/token_attention.cpp fills it.
#pragma once
#include <cstdint>

namespace pyops {

// Heads of the new tokens, [rows, heads, width], the last dimension without gaps.
struct TokenHeads {
    const float* data;
    int64_t row, head;  // strides in elements
};

struct TokenAttention {
    TokenHeads q, k, v;
    float *keys, *values;    // [rows, groups, room, width], kept
    const int64_t* places;   // [rows], where the new token of each row stands
    const float *cos, *sin;  // [rows, half]; null: nothing is turned
    float* y;                // [rows, heads, width]
    int64_t heads, groups, room, width, half;
    double scale;
    bool interleaved;
};

}  // namespace pyops
