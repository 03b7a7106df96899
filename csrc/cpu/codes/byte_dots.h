// Sixteen sums of products of bytes, at every instruction set: sum d is over the bytes
// 4 d .. 4 d + 3 of 64. The sums are exact, so that it does not matter how they are made.
//
//   avx512: one register, with VNNI   avx2: two   else: sixteen numbers
#pragma once
#include "code_lanes.h"

namespace pyops::PYOPS_ISA {
namespace {

#if defined(__AVX512F__)
// Who uses these looks for VNNI first: not every processor with AVX-512 has it.
#define PYOPS_DOTS __attribute__((target("avx512vnni")))
struct Bytes {
    __m512i x;
    static PYOPS_LANES Bytes at(const uint8_t* p, uint8_t flip) {
        return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(flip)))};
    }
    PYOPS_LANES Bytes low() const { return {_mm512_and_si512(x, _mm512_set1_epi8(15))}; }
    PYOPS_LANES Bytes high() const { return Bytes{_mm512_srli_epi16(x, 4)}.low(); }
};
struct Words {
    __m512i x;
    static PYOPS_LANES Words zero() { return {_mm512_setzero_si512()}; }
    PYOPS_LANES Words times_256() const { return {_mm512_slli_epi32(x, 8)}; }
    PYOPS_LANES Words plus(const int32_t* p) const {
        return {_mm512_add_epi32(x, _mm512_loadu_si512(p))};
    }
    PYOPS_LANES Sixteen numbers() const { return {_mm512_cvtepi32_ps(x)}; }
    // Two sums each together, in 64 bits.
    PYOPS_LANES __m512i pairs() const {
        return _mm512_cvtepi32_epi64(
            _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1)));
    }
};
PYOPS_LANES int64_t number_of(const Words (&digits)[3]) {
    return _mm512_reduce_add_epi64(_mm512_add_epi64(
        _mm512_add_epi64(digits[0].pairs(), _mm512_slli_epi64(digits[1].pairs(), 8)),
        _mm512_slli_epi64(digits[2].pairs(), 16)));
}
template <bool SMALL>
PYOPS_DOTS PYOPS_LANES Words dot(Words sums, Bytes bytes, const int8_t* digits) {
    return {_mm512_dpbusd_epi32(sums.x, bytes.x, _mm512_loadu_si512(digits))};
}
#elif defined(__AVX2__)
#define PYOPS_DOTS
struct Bytes {
    __m256i x, y;
    static PYOPS_LANES Bytes at(const uint8_t* p, uint8_t flip) {
        const __m256i other = _mm256_set1_epi8(static_cast<char>(flip));
        const __m256i* const from = reinterpret_cast<const __m256i*>(p);
        return {_mm256_xor_si256(_mm256_loadu_si256(from), other),
                _mm256_xor_si256(_mm256_loadu_si256(from + 1), other)};
    }
    PYOPS_LANES Bytes low() const {
        const __m256i mask = _mm256_set1_epi8(15);
        return {_mm256_and_si256(x, mask), _mm256_and_si256(y, mask)};
    }
    PYOPS_LANES Bytes high() const {
        return Bytes{_mm256_srli_epi16(x, 4), _mm256_srli_epi16(y, 4)}.low();
    }
};
struct Words {
    __m256i x, y;
    static PYOPS_LANES Words zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    PYOPS_LANES Words times_256() const {
        return {_mm256_slli_epi32(x, 8), _mm256_slli_epi32(y, 8)};
    }
    PYOPS_LANES Words plus(const int32_t* p) const {
        const __m256i* const from = reinterpret_cast<const __m256i*>(p);
        return {_mm256_add_epi32(x, _mm256_loadu_si256(from)),
                _mm256_add_epi32(y, _mm256_loadu_si256(from + 1))};
    }
    PYOPS_LANES Sixteen numbers() const { return {_mm256_cvtepi32_ps(x), _mm256_cvtepi32_ps(y)}; }
    PYOPS_LANES int32_t sum() const {
        const __m256i eight = _mm256_add_epi32(x, y);
        __m128i four =
            _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
    }
};
// SMALL: bytes up to 15, whose products with two digits fit into 16 bits.
template <bool SMALL>
PYOPS_LANES __m256i dot(__m256i sums, __m256i bytes, const int8_t* p) {
    const __m256i digits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if (SMALL)
        return _mm256_add_epi32(
            sums, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, digits), _mm256_set1_epi16(1)));
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(digits, 8), 8));
    const __m256i odd =
        _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), _mm256_srai_epi16(digits, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
template <bool SMALL>
PYOPS_LANES Words dot(Words sums, Bytes bytes, const int8_t* digits) {
    return {dot<SMALL>(sums.x, bytes.x, digits), dot<SMALL>(sums.y, bytes.y, digits + 32)};
}
#else
#define PYOPS_DOTS
struct Bytes {
    uint8_t x[64];
    static PYOPS_LANES Bytes at(const uint8_t* p, uint8_t flip) {
        Bytes found;
        for (int i = 0; i < 64; ++i) found.x[i] = static_cast<uint8_t>(p[i] ^ flip);
        return found;
    }
    PYOPS_LANES Bytes low() const {
        Bytes found;
        for (int i = 0; i < 64; ++i) found.x[i] = x[i] & 15;
        return found;
    }
    PYOPS_LANES Bytes high() const {
        Bytes found;
        for (int i = 0; i < 64; ++i) found.x[i] = x[i] >> 4;
        return found;
    }
};
struct Words {
    int32_t x[CODE_LANES];
    static PYOPS_LANES Words zero() { return {}; }
    PYOPS_LANES Words times_256() const {
        Words found;
        for (int64_t d = 0; d < CODE_LANES; ++d) found.x[d] = x[d] * 256;
        return found;
    }
    PYOPS_LANES Words plus(const int32_t* p) const {
        Words found;
        for (int64_t d = 0; d < CODE_LANES; ++d) found.x[d] = x[d] + p[d];
        return found;
    }
    PYOPS_LANES Sixteen numbers() const {
        float found[CODE_LANES];
        for (int64_t d = 0; d < CODE_LANES; ++d) found[d] = static_cast<float>(x[d]);
        return Sixteen::at(found);
    }
    PYOPS_LANES int32_t sum() const {
        int32_t found = 0;
        for (int64_t d = 0; d < CODE_LANES; ++d) found += x[d];
        return found;
    }
};
template <bool SMALL>
PYOPS_LANES Words dot(Words sums, const Bytes& bytes, const int8_t* digits) {
    for (int64_t d = 0; d < CODE_LANES; ++d)
        for (int64_t k = 4 * d; k < 4 * d + 4; ++k) sums.x[d] += bytes.x[k] * digits[k];
    return sums;
}
#endif

#if !defined(__AVX512F__)
// The number whose digits are the totals.
PYOPS_LANES int64_t number_of(const Words (&digits)[3]) {
    return digits[0].sum() + int64_t{256} * digits[1].sum() + int64_t{65536} * digits[2].sum();
}
#endif

}  // namespace
}  // namespace pyops::PYOPS_ISA
