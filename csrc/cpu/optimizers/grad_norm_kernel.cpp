// Sum of squares in float64, 32 partial sums side by side: number i goes to sum i % 32, whatever
// the instruction set.
#include "../rows/vector.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t SUMS = 32;
constexpr int64_t AHEAD = 2048;  // bytes

// A square of fp32 is exact in float64, so contraction can't change the sum: the same bits at every
// instruction set.
template <typename T>
void add_squares(double* sums, const T* x, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    __m512d s[4] = {_mm512_loadu_pd(sums), _mm512_loadu_pd(sums + 8), _mm512_loadu_pd(sums + 16),
                    _mm512_loadu_pd(sums + 24)};
    for (; i + SUMS <= n; i += SUMS) {
        for (int ahead = 0; ahead < int(SUMS * sizeof(T)); ahead += 64)
            _mm_prefetch(reinterpret_cast<const char*>(x + i) + AHEAD + ahead, _MM_HINT_T0);
        for (int k = 0; k < 2; ++k) {
            Vec a;
            load(a, x + i + 16 * k);
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(a.x)),
                          up = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a.x, 1));
            s[2 * k] = _mm512_fmadd_pd(low, low, s[2 * k]);
            s[2 * k + 1] = _mm512_fmadd_pd(up, up, s[2 * k + 1]);
        }
    }
    for (int k = 0; k < 4; ++k) _mm512_storeu_pd(sums + 8 * k, s[k]);
#elif defined(__AVX2__)
    __m256d s[8];
    for (int k = 0; k < 8; ++k) s[k] = _mm256_loadu_pd(sums + 4 * k);
    for (; i + SUMS <= n; i += SUMS)
        for (int k = 0; k < 4; ++k) {
            Vec a;
            load(a, x + i + 8 * k);
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(a.x)),
                          up = _mm256_cvtps_pd(_mm256_extractf128_ps(a.x, 1));
            s[2 * k] = _mm256_fmadd_pd(low, low, s[2 * k]);
            s[2 * k + 1] = _mm256_fmadd_pd(up, up, s[2 * k + 1]);
        }
    for (int k = 0; k < 8; ++k) _mm256_storeu_pd(sums + 4 * k, s[k]);
#endif
    for (; i < n; i += SUMS) {
        const int64_t count = n - i < SUMS ? n - i : SUMS;
        for (int64_t k = 0; k < count; ++k) {
            float value;
            load(value, x + i + k);
            sums[k] += static_cast<double>(value) * static_cast<double>(value);
        }
    }
}

}  // namespace

double squared_sum_kernel(const void* data, int64_t n, int dtype) {
    double sums[SUMS] = {};
    if (dtype == FP32)
        add_squares(sums, static_cast<const float*>(data), n);
    else if (dtype == BF16)
        add_squares(sums, static_cast<const Bf16*>(data), n);
    else
        add_squares(sums, static_cast<const Fp16*>(data), n);
    for (int64_t half = SUMS / 2; half > 0; half /= 2)
        for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    return sums[0];
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
