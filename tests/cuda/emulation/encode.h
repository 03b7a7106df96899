// The arguments of encodes, for the functions of codecs.cpp and their callers.
#pragma once
#include <cstdint>

// What all encodes are told; x is null where the source are rows.
struct Encode {
    int64_t n, block;
    float* error;
    uint8_t* payload;
    float* flag;
    int64_t rule, stochastic, seed, offset;
    const void* x;
    int64_t dtype;
    const void* const* rows;
    int64_t count;
    float scale;
};
