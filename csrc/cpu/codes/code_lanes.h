// Sixteen fp32 numbers side by side at every instruction set, made of codes; added up in one order:
// the bits of a sum don't depend on the registers.
//
//   avx512: one register   avx2: two   else: four
#pragma once
#include "../../math/communication/quantize.h"
#include "code_rows.h"
#include "../rows/rows.h"

namespace pyops::PYOPS_ISA {
namespace {

#define PYOPS_LANES inline __attribute__((always_inline))

// The bits of an e4m3 number behind 7 zeros, with the sign where fp16 has it: 2^-8 of it in fp16,
// which holds all of them exactly. The two codes beyond the largest number are nan.
constexpr int16_t E4M3_IN_FP16 = static_cast<int16_t>(0xBF80);
const float E4M3_NAN = float_of(0x7FC00000u);

// What a code of 8 bits stands for, a zero point and the scale aside.
template <CodeKind KIND>
PYOPS_LANES float code_number(uint8_t code) {
    if (KIND == FLOAT_E4M3) return (code & 0x7F) == 0x7F ? E4M3_NAN : quantize_number<E4M3>(code);
    return static_cast<float>(KIND == WITH_SIGN ? static_cast<int32_t>(static_cast<int8_t>(code))
                                                : static_cast<int32_t>(code));
}

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
template <CodeKind KIND>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if constexpr (KIND == FLOAT_E4M3) {
        const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7),
                                              _mm256_set1_epi16(E4M3_IN_FP16));
        const __m512 numbers = _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
        const __m128i magnitude = _mm_set1_epi8(0x7F);
        const __mmask16 bad = _mm_cmpeq_epi8_mask(_mm_and_si128(codes, magnitude), magnitude);
        return {_mm512_mask_blend_ps(bad, numbers, _mm512_set1_ps(E4M3_NAN))};
    }
    return {_mm512_cvtepi32_ps(KIND == WITH_SIGN ? _mm512_cvtepi8_epi32(codes)
                                                 : _mm512_cvtepu8_epi32(codes))};
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
template <CodeKind KIND>
PYOPS_LANES __m256 eight_bytes_at(const uint8_t* p) {
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    if constexpr (KIND == FLOAT_E4M3) {
        const __m128i half = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7),
                                           _mm_set1_epi16(E4M3_IN_FP16));
        const __m256 numbers = _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
        const __m128i magnitude = _mm_set1_epi16(0x3F80);
        const __m128i bad = _mm_cmpeq_epi16(_mm_and_si128(half, magnitude), magnitude);
        return _mm256_blendv_ps(numbers, _mm256_set1_ps(E4M3_NAN),
                                _mm256_castsi256_ps(_mm256_cvtepi16_epi32(bad)));
    }
    return _mm256_cvtepi32_ps(KIND == WITH_SIGN ? _mm256_cvtepi8_epi32(codes)
                                                : _mm256_cvtepu8_epi32(codes));
}
template <CodeKind KIND>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    return {eight_bytes_at<KIND>(p), eight_bytes_at<KIND>(p + 8)};
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
template <CodeKind KIND>
PYOPS_LANES Sixteen bytes_at(const uint8_t* p) {
    float numbers[CODE_LANES];
    for (int d = 0; d < CODE_LANES; ++d) numbers[d] = code_number<KIND>(p[d]);
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
