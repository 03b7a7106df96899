// Philox words in bulk, for the kernels: consecutive blocks, words in the order of the stream.
#pragma once
#include "../../math/philox.h"
#include "../isa.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t PHILOX_LANES = 64;  // blocks made at a time

// With AVX a block is a column of 64-bit lanes of which only the lower halves count: the
// multiplication ignores the upper ones, so a round is two products, two shifts and the exclusive
// ors, without shuffles.
#if defined(__AVX512F__)
constexpr int64_t GROUP = 8;
using Words64 = __m512i;
inline Words64 wide(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
inline Words64 counters(uint64_t block) {
    return _mm512_add_epi64(wide(block), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Words64 product(Words64 a, Words64 b) { return _mm512_mul_epu32(a, b); }
inline Words64 high(Words64 a) { return _mm512_srli_epi64(a, 32); }
inline Words64 xor3(Words64 a, Words64 b, Words64 c) {
    return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
inline Words64 pair(Words64 low, Words64 up) {
    return _mm512_mask_blend_epi32(0xAAAA, low, _mm512_slli_epi64(up, 32));
}
inline void put(uint32_t* out, Words64 words01, Words64 words23) {
    const __m512i first = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11),
                  second = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64(words01, first, words23));
    _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi64(words01, second, words23));
}
#elif defined(__AVX2__)
constexpr int64_t GROUP = 4;
using Words64 = __m256i;
inline Words64 wide(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
inline Words64 counters(uint64_t block) {
    return _mm256_add_epi64(wide(block), _mm256_setr_epi64x(0, 1, 2, 3));
}
inline Words64 product(Words64 a, Words64 b) { return _mm256_mul_epu32(a, b); }
inline Words64 high(Words64 a) { return _mm256_srli_epi64(a, 32); }
inline Words64 xor3(Words64 a, Words64 b, Words64 c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
inline Words64 pair(Words64 low, Words64 up) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(up, 32), 0xAA);
}
inline void put(uint32_t* out, Words64 words01, Words64 words23) {
    const __m256i even = _mm256_unpacklo_epi64(words01, words23),
                  odd = _mm256_unpackhi_epi64(words01, words23);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm256_permute2x128_si256(even, odd, 0x20));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8),
                        _mm256_permute2x128_si256(even, odd, 0x31));
}
#endif

// out[4 * b + i] = word i of block `block + b`, for b < lanes, a multiple of 8.
inline void philox_fill(uint32_t* __restrict out, uint64_t key, uint64_t block, uint32_t step,
                        uint32_t stream, int64_t lanes = PHILOX_LANES) {
#if defined(__AVX2__)
    const Words64 m0 = wide(PHILOX_M0), m1 = wide(PHILOX_M1);
    for (int64_t b = 0; b < lanes; b += GROUP) {
        Words64 c0 = counters(block + static_cast<uint64_t>(b)), c1 = high(c0), c2 = wide(step),
                c3 = wide(stream);
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < PHILOX_ROUNDS; ++round) {
            const Words64 product0 = product(c0, m0), product1 = product(c2, m1);
            c0 = xor3(high(product1), c1, wide(k0));
            c1 = product1;
            c2 = xor3(high(product0), c3, wide(k1));
            c3 = product0;
            k0 += PHILOX_W0;
            k1 += PHILOX_W1;
        }
        put(out + 4 * b, pair(c0, c1), pair(c2, c3));
    }
#else
    PYOPS_VECTORISE
    for (int64_t b = 0; b < lanes; ++b) {
        const uint64_t counter = block + static_cast<uint64_t>(b);
        uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32),
                 c2 = step, c3 = stream;
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma GCC unroll 10
        for (int round = 0; round < PHILOX_ROUNDS; ++round) {
            philox_round(c0, c1, c2, c3, k0, k1);
            k0 += PHILOX_W0;
            k1 += PHILOX_W1;
        }
        out[4 * b] = c0;
        out[4 * b + 1] = c1;
        out[4 * b + 2] = c2;
        out[4 * b + 3] = c3;
    }
#endif
}

// n random half-words of a stream, from element `index` on: the words' halves, low one first.
inline void random_halves(uint16_t* out, int64_t n, uint64_t key, uint64_t index, uint32_t step,
                          uint32_t stream) {
    uint32_t words[4 * PHILOX_LANES];
    for (int64_t done = 0; done < n;) {
        const uint64_t j = index + static_cast<uint64_t>(done);
        const int64_t first = static_cast<int64_t>(j & 7);
        const int64_t count =
            8 * PHILOX_LANES - first < n - done ? 8 * PHILOX_LANES - first : n - done;
        philox_fill(words, key, j >> 3, step, stream);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
        memcpy(out + done, reinterpret_cast<const char*>(words) + 2 * first,
               static_cast<size_t>(2 * count));
#else
        for (int64_t i = first; i < first + count; ++i)
            out[done + i - first] = static_cast<uint16_t>(words[i >> 1] >> (16 * (i & 1)));
#endif
        done += count;
    }
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
