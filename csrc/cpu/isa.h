// For the *_kernel.cpp files, which are compiled once per instruction set: names, and conversions between fp32 and 16 bits.
//
//   PYOPS_ISA   flags                                  machine
//   baseline    none (x86-64: SSE2; aarch64: NEON)     any
//   avx2        AVX2, FMA, F16C                        x86 since 2013 (Haswell, Zen)
//   avx512      AVX-512 F, BW, DQ, VL                  x86 since 2017 (Skylake-X, Zen 4)
//
// There is no level for AVX512-BF16: its vcvtneps2bf16 takes subnormal numbers for zero, so results would depend on the machine,
// and the kernels wait for memory anyway.
//
// A file here must define nothing with external linkage outside its instruction set's namespace, and use no template or inline
// function of the C++ library: the linker keeps one copy of such a function, which may be the AVX-512 one, and an older machine
// would stop on it. The formulas of csrc/math are always inlined.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../math/round.h"
#include "../math/table.h"
#include "kernels.h"

#define PYOPS_VECTORISE _Pragma("GCC ivdep")

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t TILE = 1024;  // elements worked on at a time: operands and scratch stay in L1

inline int64_t size_of(int dtype) { return dtype == FP32 ? 4 : dtype == FP64 ? 8 : 2; }

inline char* at(void* base, int64_t index, int dtype) { return static_cast<char*>(base) + index * size_of(dtype); }
inline const char* at(const void* base, int64_t index, int dtype) {
    return static_cast<const char*>(base) + index * size_of(dtype);
}

inline void load_bf16(float* __restrict out, const uint16_t* __restrict in, int64_t n) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_float(in[i]);
}

inline void store_bf16(uint16_t* __restrict out, const float* __restrict in, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512i half = _mm512_set1_epi32(0x7FFF), one = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x40);
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(in + i);
        const __m512i bits = _mm512_castps_si512(x), high = _mm512_srli_epi32(bits, 16);
        const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(half, _mm512_and_si512(high, one))), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        const __m512i word = _mm512_mask_or_epi32(up, nan, high, quiet);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtepi32_epi16(word));
    }
#endif
    PYOPS_VECTORISE
    for (; i < n; ++i) out[i] = float_to_bf16(in[i]);
}

inline void load_fp16(float* __restrict out, const uint16_t* __restrict in, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in + i))));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
    PYOPS_VECTORISE
    for (; i < n; ++i) out[i] = fp16_to_float(in[i]);
}

inline void store_fp16(uint16_t* __restrict out, const float* __restrict in, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_cvtps_ph(_mm512_loadu_ps(in + i), 0));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), 0));
#endif
    PYOPS_VECTORISE
    for (; i < n; ++i) out[i] = float_to_fp16(in[i]);
}

// n elements of any of the three dtypes as fp32: in `scratch`, or where they are when they are fp32 already.
inline const float* load(float* scratch, const void* from, int64_t n, int dtype) {
    if (dtype == FP32) return static_cast<const float*>(from);
    if (dtype == BF16) load_bf16(scratch, static_cast<const uint16_t*>(from), n);
    else load_fp16(scratch, static_cast<const uint16_t*>(from), n);
    return scratch;
}

inline void store(void* to, const float* from, int64_t n, int dtype) {
    if (dtype == BF16) store_bf16(static_cast<uint16_t*>(to), from, n);
    else if (dtype == FP16) store_fp16(static_cast<uint16_t*>(to), from, n);
    else if (to != from) memcpy(to, from, static_cast<size_t>(n) * 4);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
