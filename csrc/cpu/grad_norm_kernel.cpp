// Sum of squares in float64, 32 partial sums side by side; the order depends on the number of elements alone.
#include "vector.h"

namespace pyops::PYOPS_ISA {
namespace {

typedef float Float8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double Double8 __attribute__((vector_size(64)));

// A square of fp32 is exact in float64, so contraction can't change the sum: the same bits at every instruction set.
void add_squares(Double8 sums[4], const float* x, int64_t n) {
    Double8 s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        const Double8 a = __builtin_convertvector(*reinterpret_cast<const Float8*>(x + i), Double8);
        const Double8 b = __builtin_convertvector(*reinterpret_cast<const Float8*>(x + i + 8), Double8);
        const Double8 c = __builtin_convertvector(*reinterpret_cast<const Float8*>(x + i + 16), Double8);
        const Double8 d = __builtin_convertvector(*reinterpret_cast<const Float8*>(x + i + 24), Double8);
        s0 += a * a;
        s1 += b * b;
        s2 += c * c;
        s3 += d * d;
    }
    for (; i < n; ++i) {
        const double value = x[i];
        s0[i & 7] += value * value;
    }
    sums[0] = s0;
    sums[1] = s1;
    sums[2] = s2;
    sums[3] = s3;
}

}  // namespace

double squared_sum_kernel(const void* data, int64_t n, int dtype) {
    Double8 sums[4] = {};
    float scratch[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        add_squares(sums, as_fp32(scratch, at(data, start, dtype), count, dtype), count);
    }
    const Double8 total = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
}

int64_t count_nonfinite_kernel(const void* data, int64_t n, int dtype) {
    float scratch[TILE];
    int64_t found = 0;
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        const float* x = as_fp32(scratch, at(data, start, dtype), count, dtype);
        int32_t here = 0;
        for (int64_t i = 0; i < count; ++i) here += (bits_of(x[i]) & 0x7F800000u) == 0x7F800000u;
        found += here;
    }
    return found;
}

}  // namespace pyops::PYOPS_ISA
