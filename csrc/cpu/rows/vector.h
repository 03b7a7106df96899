// A register's worth of fp32 numbers, so that a formula of csrc/math and its loop are written once
// for every instruction set.
//
//   Vec      avx512: 16 numbers   avx2: 8   else: one, and the compiler makes vectors of the loop
//   Bf16, Fp16   how 16-bit numbers stand in memory; load and store convert, to nearest even
//
// A loop runs over Vec first and over float for the rest: `for_each<...>(n, f)` calls
// f(Lane<Vec>{}, i), then f(Lane<float>{}, i).
#pragma once
#include "../../math/exponential.h"
#include "../isa.h"

namespace pyops::PYOPS_ISA {
namespace {

struct Bf16 {
    uint16_t bits;
};
struct Fp16 {
    uint16_t bits;
};
// Bf16 that won't be read soon: written past the caches, so that its line is not fetched first.
// Aligned to the register's half.
struct StreamedBf16 {
    uint16_t bits;
};
struct StreamedFloat {  // the same for fp32, aligned to the register
    float value;
};
struct None {};

#if defined(__AVX512F__)
struct Vec {
    static constexpr int64_t N = 16;
    __m512 x;
    Vec() = default;
    Vec(__m512 value) : x(value) {}
    explicit Vec(float value) : x(_mm512_set1_ps(value)) {}
    friend Vec operator+(Vec a, Vec b) { return _mm512_add_ps(a.x, b.x); }
    friend Vec operator-(Vec a, Vec b) { return _mm512_sub_ps(a.x, b.x); }
    friend Vec operator*(Vec a, Vec b) { return _mm512_mul_ps(a.x, b.x); }
    friend Vec operator/(Vec a, Vec b) { return _mm512_div_ps(a.x, b.x); }
};
inline Vec square_root(Vec a) { return _mm512_sqrt_ps(a.x); }
inline Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a.x, b.x, c.x); }
inline Vec negative_fused(Vec a, Vec b, Vec c) { return _mm512_fnmadd_ps(a.x, b.x, c.x); }
inline Vec larger(Vec a, Vec b) {  // a nan on either side stays
    const __mmask16 take =
        _mm512_cmp_ps_mask(a.x, b.x, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a.x, a.x, _CMP_UNORD_Q);
    return _mm512_mask_blend_ps(take, b.x, a.x);
}
inline Vec sign_of(Vec a) {  // a nan stays
    const __m512 zero = _mm512_setzero_ps(), one = _mm512_set1_ps(1.0f);
    const __m512 positive =
        _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, zero, _CMP_GT_OQ), a.x, one);
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, zero, _CMP_LT_OQ), positive,
                                _mm512_set1_ps(-1.0f));
}
inline Vec at_least(Vec x, Vec low) { return _mm512_max_ps(low.x, x.x); }  // a nan in x stays
inline Vec at_most(Vec x, Vec high) { return _mm512_min_ps(high.x, x.x); }
inline Vec times_power_of_two(Vec p, Vec n) { return _mm512_scalef_ps(p.x, n.x); }
inline Vec unless_zero(Vec condition, Vec a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(condition.x, _mm512_setzero_ps(), _CMP_NEQ_UQ),
                               a.x);
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.x, b.x, _CMP_LT_OQ), y.x, x.x);
}
inline Vec magnitude(Vec a) { return _mm512_abs_ps(a.x); }
inline void load(Vec& out, const float* p) { out = _mm512_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.x); }
inline void store(StreamedFloat* p, Vec a) { _mm512_stream_ps(&p->value, a.x); }
inline __m256i halves(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void load(Vec& out, const Bf16* p) {
    out = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(p)), 16));
}
inline void load(Vec& out, const Fp16* p) { out = _mm512_cvtph_ps(halves(p)); }
// The bits of bf16 in the upper halves; the lower ones are to be dropped.
inline __m512i upper_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x),
                  odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), bits,
                                _mm512_set1_epi32(0x400000));
}
inline void store(Bf16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_bf16(a.x), 16)));
}
inline void store(StreamedBf16* p, Vec a) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_bf16(a.x), 16)));
}
inline void store(Fp16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.x, 0));
}
// 32 numbers as even and odd ones: shifts and masks instead of shuffles, for loops in which the
// order does not matter.
inline void load_split(const Bf16* p, Vec& even, Vec& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(
        _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline void store_split(Bf16* p, Vec even, Vec odd) {
    const __m512i low = _mm512_srli_epi32(upper_bf16(even.x), 16);
    _mm512_storeu_si512(p, _mm512_mask_blend_epi16(0xAAAAAAAAu, low, upper_bf16(odd.x)));
}
#elif defined(__AVX2__) && defined(__F16C__)
struct Vec {
    static constexpr int64_t N = 8;
    __m256 x;
    Vec() = default;
    Vec(__m256 value) : x(value) {}
    explicit Vec(float value) : x(_mm256_set1_ps(value)) {}
    friend Vec operator+(Vec a, Vec b) { return _mm256_add_ps(a.x, b.x); }
    friend Vec operator-(Vec a, Vec b) { return _mm256_sub_ps(a.x, b.x); }
    friend Vec operator*(Vec a, Vec b) { return _mm256_mul_ps(a.x, b.x); }
    friend Vec operator/(Vec a, Vec b) { return _mm256_div_ps(a.x, b.x); }
};
inline Vec square_root(Vec a) { return _mm256_sqrt_ps(a.x); }
inline Vec fused(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a.x, b.x, c.x); }
inline Vec negative_fused(Vec a, Vec b, Vec c) { return _mm256_fnmadd_ps(a.x, b.x, c.x); }
inline Vec larger(Vec a, Vec b) {
    const __m256 take =
        _mm256_or_ps(_mm256_cmp_ps(a.x, b.x, _CMP_GT_OQ), _mm256_cmp_ps(a.x, a.x, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b.x, a.x, take);
}
inline Vec sign_of(Vec a) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 positive =
        _mm256_blendv_ps(a.x, _mm256_set1_ps(1.0f), _mm256_cmp_ps(a.x, zero, _CMP_GT_OQ));
    return _mm256_blendv_ps(positive, _mm256_set1_ps(-1.0f), _mm256_cmp_ps(a.x, zero, _CMP_LT_OQ));
}
inline Vec at_least(Vec x, Vec low) { return _mm256_max_ps(low.x, x.x); }  // a nan in x stays
inline Vec at_most(Vec x, Vec high) { return _mm256_min_ps(high.x, x.x); }
inline Vec times_power_of_two(Vec p, Vec n) {
    const __m256i k = _mm256_cvtps_epi32(n.x), half = _mm256_srai_epi32(k, 1),
                  bias = _mm256_set1_epi32(127);
    const __m256 first = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    const __m256i rest = _mm256_add_epi32(_mm256_sub_epi32(k, half), bias);
    return _mm256_mul_ps(_mm256_mul_ps(p.x, first),
                         _mm256_castsi256_ps(_mm256_slli_epi32(rest, 23)));
}
inline Vec unless_zero(Vec condition, Vec a) {
    return _mm256_and_ps(_mm256_cmp_ps(condition.x, _mm256_setzero_ps(), _CMP_NEQ_UQ), a.x);
}
inline Vec where_less(Vec a, Vec b, Vec x, Vec y) {
    return _mm256_blendv_ps(y.x, x.x, _mm256_cmp_ps(a.x, b.x, _CMP_LT_OQ));
}
inline Vec magnitude(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.x); }
inline void load(Vec& out, const float* p) { out = _mm256_loadu_ps(p); }
inline void store(float* p, Vec a) { _mm256_storeu_ps(p, a.x); }
inline void store(StreamedFloat* p, Vec a) { _mm256_stream_ps(&p->value, a.x); }
inline __m128i halves(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void load(Vec& out, const Bf16* p) {
    out = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves(p)), 16));
}
inline void load(Vec& out, const Fp16* p) { out = _mm256_cvtph_ps(halves(p)); }
inline __m256i upper_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x),
                  odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, quiet,
                              _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
inline __m128i to_bf16(__m256 x) {
    const __m256i words = _mm256_srli_epi32(upper_bf16(x), 16);
    return _mm256_castsi256_si128(
        _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08));
}
inline void store(Bf16* p, Vec a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bf16(a.x)); }
inline void store(StreamedBf16* p, Vec a) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), to_bf16(a.x));
}
inline void store(Fp16* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.x, 0));
}
inline void load_split(const Bf16* p, Vec& even, Vec& odd) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    odd = _mm256_castsi256_ps(
        _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}
inline void store_split(Bf16* p, Vec even, Vec odd) {
    const __m256i low = _mm256_srli_epi32(upper_bf16(even.x), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm256_blend_epi16(low, upper_bf16(odd.x), 0xAA));
}
#else
using Vec = float;
#endif

// The same operations on single numbers, which those on registers would hide.
using pyops::at_least;
using pyops::at_most;
using pyops::fused;
using pyops::larger;
using pyops::magnitude;
using pyops::negative_fused;
using pyops::square_root;
using pyops::times_power_of_two;
using pyops::unless_zero;
using pyops::where_less;

// Streamed stores are seen by other threads in order with what follows.
inline void fence_streams() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

inline void load(float& out, const float* p) { out = *p; }
inline void load(float& out, const Bf16* p) { out = bf16_to_float(p->bits); }
inline void load(float& out, const Fp16* p) { out = fp16_to_float(p->bits); }
inline void store(float* p, float a) { *p = a; }
inline void store(StreamedFloat* p, float a) { p->value = a; }
inline void store(Bf16* p, float a) { p->bits = float_to_bf16(a); }
inline void store(StreamedBf16* p, float a) { p->bits = float_to_bf16(a); }
inline void store(Fp16* p, float a) { p->bits = float_to_fp16(a); }

template <typename V>
constexpr int64_t WIDTH = static_cast<int64_t>(sizeof(V) / sizeof(float));
template <typename V>
struct Lane {
    using type = V;
};

// Calls f(Lane<V>{}, i) for i = start, start + WIDTH<V>, ... and returns where it stopped, less
// than WIDTH<V> from n.
template <typename V, typename F>
inline __attribute__((always_inline)) int64_t sweep(int64_t start, int64_t n, const F& f) {
    int64_t i = start;
    PYOPS_VECTORISE
    for (; i + WIDTH<V> <= n; i += WIDTH<V>) f(Lane<V>{}, i);
    return i;
}

template <typename F>
inline __attribute__((always_inline)) void for_each(int64_t n, const F& f) {
    int64_t done = 0;
    if (WIDTH<Vec> > 1) done = sweep<Vec>(0, n, f);
    sweep<float>(done, n, f);
}

template <typename To, typename From>
inline void convert(To* __restrict out, const From* __restrict in, int64_t n) {
    for_each(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type x;
        load(x, in + i);
        store(out + i, x);
    });
}

// n elements of any of the three dtypes as fp32: in `scratch`, or where they are when they are fp32
// already.
inline const float* as_fp32(float* scratch, const void* from, int64_t n, int dtype) {
    if (dtype == FP32) return static_cast<const float*>(from);
    if (dtype == BF16)
        convert(scratch, static_cast<const Bf16*>(from), n);
    else
        convert(scratch, static_cast<const Fp16*>(from), n);
    return scratch;
}

inline void from_fp32(void* to, const float* from, int64_t n, int dtype) {
    if (dtype == BF16)
        convert(static_cast<Bf16*>(to), from, n);
    else if (dtype == FP16)
        convert(static_cast<Fp16*>(to), from, n);
    else if (to != from)
        memcpy(to, from, static_cast<size_t>(n) * 4);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
