// N of M by magnitude (math/sparse/nm_mask.h), and bits that say which. Two ways, with equal bits:
//
//   M = 4 of neighbors, 16 and 32 bits wide   a register holds whole groups; three rotations within
//                                             the groups bring each number beside the others
//   all others                                a block of groups at a time, one after the other in
//                                             `keys`, so that the compiler makes vectors of groups
#include "../../math/sparse/nm_mask.h"
#include "../isa.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int LANES = 64;  // groups of a block

#define PYOPS_INLINE __attribute__((always_inline))

// Eight flags of 0 and 1 as the bits of a byte, the first one lowest.
inline uint8_t packed(const uint8_t* flags) {
    uint8_t byte = 0;
    for (int i = 0; i < 8; ++i) byte = static_cast<uint8_t>(byte | (flags[i] << i));
    return byte;
}

// Sets bits [start, start + n) where a flag is 1; the bytes are zero before.
inline void set_bits(uint8_t* bits, int64_t start, const uint8_t* flags, int64_t n) {
    int64_t i = 0;
    for (; i < n && (start + i) % 8; ++i)
        bits[(start + i) / 8] |= static_cast<uint8_t>(flags[i] << ((start + i) % 8));
    for (; i + 8 <= n; i += 8) bits[(start + i) / 8] = packed(flags + i);
    for (; i < n; ++i) bits[(start + i) / 8] |= static_cast<uint8_t>(flags[i] << ((start + i) % 8));
}

// How many of the others beat each of a block's numbers: keys and counts [m, LANES].
template <typename K>
inline PYOPS_INLINE void count_beaten(const K* __restrict keys, K* __restrict counts, int m) {
    memset(counts, 0, sizeof(K) * LANES * static_cast<size_t>(m));
    for (int j = 1; j < m; ++j)
        for (int i = 0; i < j; ++i) {
            PYOPS_VECTORISE
            for (int lane = 0; lane < LANES; ++lane) {
                const K later = keys[j * LANES + lane] > keys[i * LANES + lane];
                counts[i * LANES + lane] += later;
                counts[j * LANES + lane] += K(1) - later;
            }
        }
}

// `lanes` groups, `step` elements from one to the next, and `inner` from one number of a group to
// the next.
template <typename K>
void mask_block(const K* w, K* out, int64_t lanes, int64_t step, int64_t inner, int n, int m,
                uint8_t* flags) {
    using Key = MagnitudeKey<sizeof(K)>;
    K keys[MOST_OF_GROUP * LANES], counts[MOST_OF_GROUP * LANES];
    for (int j = 0; j < m; ++j) {
        for (int64_t lane = 0; lane < lanes; ++lane)
            keys[j * LANES + lane] = w[j * inner + lane * step] & Key::mask;
        for (int64_t lane = lanes; lane < LANES; ++lane) keys[j * LANES + lane] = 0;
    }
    if (m == 4)
        count_beaten(keys, counts, 4);
    else if (m == 8)
        count_beaten(keys, counts, 8);
    else
        count_beaten(keys, counts, m);
    for (int j = 0; j < m; ++j)
        for (int64_t lane = 0; lane < lanes; ++lane) {
            const bool kept = counts[j * LANES + lane] < n;
            out[j * inner + lane * step] = kept ? w[j * inner + lane * step] : K(0);
            // Flags in the order of the elements: of neighbors by groups, else by members.
            flags[inner == 1 ? lane * m + j : j * LANES + lane] = kept;
        }
}

template <typename K>
void mask_units(const NMSpan& span, int64_t first, int64_t last) {
    const int64_t unit = span.m * span.inner;
    const K* const w = static_cast<const K*>(span.w);
    K* const out = static_cast<K*>(span.masked);
    uint8_t flags[MOST_OF_GROUP * LANES];
    if (span.inner == 1) {
        for (int64_t u = first; u < last; u += LANES) {
            const int64_t lanes = last - u < LANES ? last - u : LANES;
            mask_block(w + u * unit, out + u * unit, lanes, unit, 1, span.n, span.m, flags);
            set_bits(span.bits, u * unit, flags, lanes * unit);
        }
        return;
    }
    for (int64_t u = first; u < last; ++u)
        for (int64_t i = 0; i < span.inner; i += LANES) {
            const int64_t lanes = span.inner - i < LANES ? span.inner - i : LANES;
            const int64_t at = u * unit + i;
            mask_block(w + at, out + at, lanes, 1, span.inner, span.n, span.m, flags);
            for (int j = 0; j < span.m; ++j)
                set_bits(span.bits, at + j * span.inner, flags + j * LANES, lanes);
        }
}

#if defined(__AVX512F__)
// Beaten by the number that stands R places further on in its group (and by that R places before
// the fourth): masks of lanes, of which TIES are those where it has the lower index.
struct Words {
    using K = int32_t;
    using Mask = __mmask16;
    static constexpr int64_t N = 16;
    static constexpr uint32_t ties[3] = {0x8888, 0xCCCC, 0xEEEE};
    static __m512i magnitude(__m512i w) {
        return _mm512_and_si512(w, _mm512_set1_epi32(MagnitudeKey<4>::mask));
    }
    template <int R>
    static Mask beaten(__m512i a) {
        constexpr _MM_PERM_ENUM rotation = static_cast<_MM_PERM_ENUM>(R == 1   ? 0x39
                                                                      : R == 2 ? 0x4E
                                                                               : 0x93);
        const __m512i b = _mm512_shuffle_epi32(a, rotation);
        return static_cast<Mask>(
            _mm512_cmpgt_epi32_mask(b, a) |
            _mm512_mask_cmpeq_epi32_mask(static_cast<Mask>(ties[R - 1]), b, a));
    }
    static __m512i keep(Mask kept, __m512i w) { return _mm512_maskz_mov_epi32(kept, w); }
};
struct Halves {
    using K = int16_t;
    using Mask = __mmask32;
    static constexpr int64_t N = 32;
    static constexpr uint32_t ties[3] = {0x88888888, 0xCCCCCCCC, 0xEEEEEEEE};
    static __m512i magnitude(__m512i w) {
        return _mm512_and_si512(w, _mm512_set1_epi16(MagnitudeKey<2>::mask));
    }
    template <int R>
    static Mask beaten(__m512i a) {
        constexpr int rotation = R == 1 ? 0x39 : R == 2 ? 0x4E : 0x93;
        const __m512i b = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(a, rotation), rotation);
        return _mm512_cmpgt_epi16_mask(b, a) | _mm512_mask_cmpeq_epi16_mask(ties[R - 1], b, a);
    }
    static __m512i keep(Mask kept, __m512i w) { return _mm512_maskz_mov_epi16(kept, w); }
};
using Register = __m512i;
inline Register load_register(const void* p) { return _mm512_loadu_si512(p); }
inline void store_register(void* p, Register a) { _mm512_storeu_si512(p, a); }
#elif defined(__AVX2__)
// The same, where a mask is a register of ones and zeros.
struct Words {
    using K = int32_t;
    using Mask = __m256i;
    static constexpr int64_t N = 8;
    static __m256i magnitude(__m256i w) {
        return _mm256_and_si256(w, _mm256_set1_epi32(MagnitudeKey<4>::mask));
    }
    template <int R>
    static Mask beaten(__m256i a) {
        constexpr int rotation = R == 1 ? 0x39 : R == 2 ? 0x4E : 0x93;
        constexpr int second = R == 3 ? -1 : 0, third = R >= 2 ? -1 : 0;
        const __m256i b = _mm256_shuffle_epi32(a, rotation);
        const __m256i ties = _mm256_setr_epi32(0, second, third, -1, 0, second, third, -1);
        return _mm256_or_si256(_mm256_cmpgt_epi32(b, a),
                               _mm256_and_si256(_mm256_cmpeq_epi32(b, a), ties));
    }
    static uint32_t bits(Mask kept) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(kept)));
    }
};
struct Halves {
    using K = int16_t;
    using Mask = __m256i;
    static constexpr int64_t N = 16;
    static __m256i magnitude(__m256i w) {
        return _mm256_and_si256(w, _mm256_set1_epi16(MagnitudeKey<2>::mask));
    }
    template <int R>
    static Mask beaten(__m256i a) {
        constexpr int rotation = R == 1 ? 0x39 : R == 2 ? 0x4E : 0x93;
        constexpr int64_t group = static_cast<int64_t>(R == 1   ? 0xFFFF000000000000
                                                       : R == 2 ? 0xFFFFFFFF00000000
                                                                : 0xFFFFFFFFFFFF0000);
        const __m256i b = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(a, rotation), rotation);
        return _mm256_or_si256(
            _mm256_cmpgt_epi16(b, a),
            _mm256_and_si256(_mm256_cmpeq_epi16(b, a), _mm256_set1_epi64x(group)));
    }
    static uint32_t bits(Mask kept) {
        const __m128i bytes =
            _mm_packs_epi16(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
        return static_cast<uint32_t>(_mm_movemask_epi8(bytes));
    }
};
using Register = __m256i;
inline Register load_register(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
inline void store_register(void* p, Register a) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
#endif

#if defined(__AVX2__)
// Whether N or more of the three others beat it.
template <int N, typename Mask>
inline PYOPS_INLINE Mask dropped(Mask a, Mask b, Mask c) {
    if constexpr (N == 1) return static_cast<Mask>(a | b | c);
    if constexpr (N == 2) return static_cast<Mask>((a & b) | (c & (a | b)));
    return static_cast<Mask>(a & b & c);
}

// Groups of four neighbors from element `begin` on, in whole registers; returns where it stopped.
template <int N, typename F>
int64_t fours_of(const NMSpan& span, int64_t begin, int64_t end) {
    using K = typename F::K;
    const K* const w = static_cast<const K*>(span.w);
    K* const out = static_cast<K*>(span.masked);
    int64_t i = begin;
    for (; i + F::N <= end; i += F::N) {
        const Register x = load_register(w + i), a = F::magnitude(x);
        const auto drop = dropped<N>(F::template beaten<1>(a), F::template beaten<2>(a),
                                     F::template beaten<3>(a));
#if defined(__AVX512F__)
        const typename F::Mask kept = static_cast<typename F::Mask>(~drop);
        store_register(out + i, F::keep(kept, x));
        memcpy(span.bits + i / 8, &kept, sizeof kept);
#else
        store_register(out + i, _mm256_andnot_si256(drop, x));
        const uint32_t kept = ~F::bits(drop);
        memcpy(span.bits + i / 8, &kept, F::N / 8);
#endif
    }
    return i;
}

template <typename F>
int64_t mask_fours(const NMSpan& span, int64_t begin, int64_t end) {
    if (span.n == 1) return fours_of<1, F>(span, begin, end);
    if (span.n == 2) return fours_of<2, F>(span, begin, end);
    return fours_of<3, F>(span, begin, end);
}
#endif

}  // namespace

void nm_mask_kernel(const NMSpan& span, int64_t first, int64_t last) {
    const int64_t unit = span.m * span.inner, width = size_of(span.dtype);
#if defined(__AVX2__)
    if (span.m == 4 && span.n < 4 && span.inner == 1 && width < 8)
        first =
            (width == 4 ? mask_fours<Words> : mask_fours<Halves>)(span, first * 4, last * 4) / 4;
#endif
    if (first >= last) return;
    memset(span.bits + first * unit / 8, 0,
           static_cast<size_t>((last * unit + 7) / 8 - first * unit / 8));
    if (width == 2)
        mask_units<int16_t>(span, first, last);
    else if (width == 4)
        mask_units<int32_t>(span, first, last);
    else
        mask_units<int64_t>(span, first, last);
}

}  // namespace pyops::PYOPS_ISA
