// Sixteen fp32 numbers side by side at every instruction set, made of codes; added up in one order:
// the bits of a sum don't depend on the registers.
//
//   avx512: one register   avx2: two   else: four
#pragma once
#include "code_rows.h"
#include "rows.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_LANES inline __attribute__((always_inline))

#if defined(__AVX512F__)
struct Sixteen {
    __m512 x;
    static PYOPS_LANES Sixteen all(float value) { return {_mm512_set1_ps(value)}; }
    static PYOPS_LANES Sixteen at(const float* p) { return {_mm512_loadu_ps(p)}; }
    friend PYOPS_LANES Sixteen operator+(Sixteen a, Sixteen b) { return {_mm512_add_ps(a.x, b.x)}; }
    friend PYOPS_LANES Sixteen operator-(Sixteen a, Sixteen b) { return {_mm512_sub_ps(a.x, b.x)}; }
    friend PYOPS_LANES Sixteen operator*(Sixteen a, Sixteen b) { return {_mm512_mul_ps(a.x, b.x)}; }
    PYOPS_LANES float sum() const { return sum_of(Vec(x)); }
};
template <bool SIGNED>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(SIGNED ? _mm512_cvtepi8_epi32(codes) : _mm512_cvtepu8_epi32(codes))};
}
// 128 codes of 4 bits, of which `number(k)` has every eighth from k on.
template <bool SIGNED>
struct Nibbles {
    __m512i words;
    explicit PYOPS_LANES Nibbles(const uint8_t* p) : words(_mm512_loadu_si512(p)) {}
    PYOPS_LANES Sixteen number(int k) const {  // of an index, a permutation reads the low 4 bits
        const __m512 table =
            SIGNED ? _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1)
                   : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return {
            _mm512_permutexvar_ps(_mm512_srli_epi32(words, static_cast<unsigned>(4 * k)), table)};
    }
};
#elif defined(__AVX2__)
struct Sixteen {
    __m256 x, y;
    static PYOPS_LANES Sixteen all(float value) {
        return {_mm256_set1_ps(value), _mm256_set1_ps(value)};
    }
    static PYOPS_LANES Sixteen at(const float* p) {
        return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
    }
    friend PYOPS_LANES Sixteen operator+(Sixteen a, Sixteen b) {
        return {_mm256_add_ps(a.x, b.x), _mm256_add_ps(a.y, b.y)};
    }
    friend PYOPS_LANES Sixteen operator-(Sixteen a, Sixteen b) {
        return {_mm256_sub_ps(a.x, b.x), _mm256_sub_ps(a.y, b.y)};
    }
    friend PYOPS_LANES Sixteen operator*(Sixteen a, Sixteen b) {
        return {_mm256_mul_ps(a.x, b.x), _mm256_mul_ps(a.y, b.y)};
    }
    PYOPS_LANES float sum() const { return sum_of(_mm256_add_ps(x, y)); }
};
template <bool SIGNED>
PYOPS_LANES __m256 eight_bytes_at(const uint8_t* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtepi32_ps(SIGNED ? _mm256_cvtepi8_epi32(codes) : _mm256_cvtepu8_epi32(codes));
}
template <bool SIGNED>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    return {eight_bytes_at<SIGNED>(p), eight_bytes_at<SIGNED>(p + 8)};
}
template <bool SIGNED>
struct Nibbles {
    __m256i low, high;
    explicit PYOPS_LANES Nibbles(const uint8_t* p)
        : low(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          high(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))) {}
    static PYOPS_LANES __m256 numbers(__m256i words, int k) {
        const __m256i top = _mm256_slli_epi32(words, 28 - 4 * k);
        return _mm256_cvtepi32_ps(SIGNED ? _mm256_srai_epi32(top, 28) : _mm256_srli_epi32(top, 28));
    }
    PYOPS_LANES Sixteen number(int k) const { return {numbers(low, k), numbers(high, k)}; }
};
#else
struct Sixteen {
    FourFloats x[4];
    static PYOPS_LANES Sixteen all(float v) {
        const FourFloats four = {v, v, v, v};
        return {{four, four, four, four}};
    }
    static PYOPS_LANES Sixteen at(const float* p) {
        Sixteen found;
        memcpy(&found.x, p, sizeof found.x);
        return found;
    }
    friend PYOPS_LANES Sixteen operator+(Sixteen a, Sixteen b) {
        return {{a.x[0] + b.x[0], a.x[1] + b.x[1], a.x[2] + b.x[2], a.x[3] + b.x[3]}};
    }
    friend PYOPS_LANES Sixteen operator-(Sixteen a, Sixteen b) {
        return {{a.x[0] - b.x[0], a.x[1] - b.x[1], a.x[2] - b.x[2], a.x[3] - b.x[3]}};
    }
    friend PYOPS_LANES Sixteen operator*(Sixteen a, Sixteen b) {
        return {{a.x[0] * b.x[0], a.x[1] * b.x[1], a.x[2] * b.x[2], a.x[3] * b.x[3]}};
    }
    PYOPS_LANES float sum() const {
        const FourFloats four = (x[0] + x[2]) + (x[1] + x[3]);
        return (four[0] + four[2]) + (four[1] + four[3]);
    }
};
template <bool SIGNED>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    float numbers[CODE_LANES];
    for (int d = 0; d < CODE_LANES; ++d)
        numbers[d] = static_cast<float>(SIGNED ? static_cast<int32_t>(static_cast<int8_t>(p[d]))
                                               : static_cast<int32_t>(p[d]));
    return Sixteen::at(numbers);
}
template <bool SIGNED>
struct Nibbles {
    uint32_t words[CODE_LANES];
    explicit PYOPS_LANES Nibbles(const uint8_t* p) { memcpy(words, p, sizeof words); }
    PYOPS_LANES Sixteen number(int k) const {
        float numbers[CODE_LANES];
        for (int d = 0; d < CODE_LANES; ++d) {
            const uint32_t top = words[d] << (28 - 4 * k);
            numbers[d] = static_cast<float>(SIGNED ? static_cast<int32_t>(top) >> 28
                                                   : static_cast<int32_t>(top >> 28));
        }
        return Sixteen::at(numbers);
    }
};
#endif

}  // namespace
}  // namespace pyops::PYOPS_ISA
