// What the kernel of a product with codes as weights is told: few rows of fp32 numbers, and codes
// that are read once.
//
//   8 bits    x as it is, zeros behind it up to a multiple of 16
//   4 bits    a block of 128 codes is 16 words of 8 codes; a register of words shifted by 4 k holds
//             the codes k, 8 + k, 16 + k, ... so x lies in blocks [8][16]: place 16 k + d of a
//             block is number 8 d + k of it. Zeros behind it up to a multiple of 128
#pragma once
#include <cstdint>

namespace pyops {

constexpr int64_t CODE_LANES = 16;
constexpr int64_t NIBBLE_BLOCK = 128;

// What a code is: a whole number with a sign, one from 0 on, or fp8 e4m3.
enum CodeKind : int { WITH_SIGN, WITHOUT_SIGN, FLOAT_E4M3 };

struct CodeProduct {
    const float* x;        // [rows, stride]
    void* out;             // [rows, outputs], fp32, bf16 or fp16
    const uint8_t* codes;  // [outputs, row_bytes]
    const float* scales;   // [outputs, groups]
    const int32_t* zeros;  // the same; null: symmetric
    const float* bias;     // [outputs], or null
    int64_t rows, width, stride, row_bytes, outputs;
    int64_t group, groups;  // numbers of a row that share a scale, and how many of these there are
    int bits, dtype;        // bits: 4 or 8
    CodeKind kind;          // WITHOUT_SIGN: with zeros
};

struct CodeRows {
    const uint8_t* codes;  // [rows, row_bytes]
    const float* scales;   // [rows, groups]
    const int32_t* zeros;  // the same; null: symmetric
    void* out;             // [rows, width], fp32, bf16 or fp16
    int64_t width, row_bytes, group, groups;
    int bits, dtype;
    CodeKind kind;
};

}  // namespace pyops
