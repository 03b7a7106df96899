// Rows of x as whole numbers of 24 bits, for products with codes that are whole numbers, too: sums
// of them are exact in any order, and a processor multiplies bytes four times as fast as fp32.
//
//   X = round(x / unit), unit = the largest magnitude of the row / FIXED_LARGEST
//   X = digit[0] + 256 digit[1] + 65536 digit[2], digits of -128 .. 127
//
// A chunk is 64 numbers of a row, and its digits lie one after the other: [3][64]. Of codes of 4
// bits, two of which are in a byte, a block of 128 numbers is two chunks: the numbers of the low
// halves (0, 2, 4, ...), then those of the high ones. Behind the end of a row all digits are 0.
#pragma once
#include <cstdint>

namespace pyops {

constexpr int64_t FIXED_CHUNK = 64;
constexpr int64_t FIXED_DIGITS = 3;
constexpr float FIXED_LARGEST = 8355584.0f;  // 127 * 65536 + 127 * 256: rounding adds 2 at most
// Sums of so many products of a byte and a digit fit into 32 bits.
constexpr int64_t FIXED_WIDTH = 65536;

struct FixedRows {
    const float* x;  // [rows, width]
    int8_t* digits;  // [rows, chunks, 3, 64]
    // [rows, blocks, 16], of codes of 4 bits with a sign: -8 times the sum of eight numbers each,
    // as the codes are read 8 too high
    int32_t* offsets;
    int64_t* sums;  // [rows]: of all X
    double* units;  // [rows]; nan for a row with a number that is not finite
    int64_t width, chunks;
    int bits;
};

}  // namespace pyops
