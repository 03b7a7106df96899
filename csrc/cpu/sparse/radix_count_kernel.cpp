// Counts of magnitudes by the bits of their fp32 patterns, and the zeroing of what a mask leaves
// out.
//
//   pattern of |x|   0 | upper 15 bits | lower 16 bits      orders as |x| does
//
// The counts of the upper bits are in two tables, of even and of odd numbers, because two
// increments of one counter wait for each other.
#include "radix_count.h"
#include "../rows/storage.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t BLOCK = 32;  // numbers that are compared before one of them is counted

inline __attribute__((always_inline)) void count_upper(const uint32_t* x, int64_t n,
                                                       uint32_t* counts) {
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        uint64_t pair[2];
        memcpy(pair, x + i, sizeof pair);
        ++counts[(pair[0] >> 16) & 0x7FFF];
        ++counts[UPPER_BINS + ((pair[0] >> 48) & 0x7FFF)];
        ++counts[(pair[1] >> 16) & 0x7FFF];
        ++counts[UPPER_BINS + ((pair[1] >> 48) & 0x7FFF)];
    }
    for (; i < n; ++i) ++counts[(x[i] >> 16) & 0x7FFF];
}

inline __attribute__((always_inline)) void count_lower(const uint32_t* x, int64_t n,
                                                       uint32_t prefix, uint32_t* counts) {
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        uint32_t found = 0;
        PYOPS_VECTORISE
        for (int64_t k = 0; k < BLOCK; ++k)
            found |= static_cast<uint32_t>(((x[i + k] >> 16) & 0x7FFFu) == prefix);
        if (!found) continue;
        for (int64_t k = 0; k < BLOCK; ++k)
            if (((x[i + k] >> 16) & 0x7FFFu) == prefix) ++counts[x[i + k] & 0xFFFFu];
    }
    for (; i < n; ++i)
        if (((x[i] >> 16) & 0x7FFFu) == prefix) ++counts[x[i] & 0xFFFFu];
}

// 64 bits of the mask, from element i on, a multiple of 8; those beyond the last byte are 0.
inline uint64_t bits_at(const uint8_t* bits, int64_t i, int64_t n) {
    const int64_t rest = (n - i + 7) / 8;
    uint64_t found = 0;
    memcpy(&found, bits + i / 8, static_cast<size_t>(rest < 8 ? rest : 8));
    return found;
}

// U: an unsigned whole number of the size of a stored number.
template <typename U>
inline __attribute__((always_inline)) void keep(U* x, const uint8_t* bits, int64_t n) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        const uint64_t alive = bits_at(bits, i, n);
        if (alive == ~uint64_t{0}) continue;
#if defined(__AVX512F__)
        if constexpr (sizeof(U) == 4) {
            for (int k = 0; k < 4; ++k) {
                const __mmask16 here = static_cast<__mmask16>(alive >> (16 * k));
                _mm512_storeu_si512(x + i + 16 * k, _mm512_maskz_loadu_epi32(here, x + i + 16 * k));
            }
            continue;
        } else if constexpr (sizeof(U) == 2) {
            for (int k = 0; k < 2; ++k) {
                const __mmask32 here = static_cast<__mmask32>(alive >> (32 * k));
                _mm512_storeu_si512(x + i + 32 * k, _mm512_maskz_loadu_epi16(here, x + i + 32 * k));
            }
            continue;
        }
#endif
        PYOPS_VECTORISE
        for (int64_t k = 0; k < 64; ++k)
            x[i + k] = static_cast<U>(x[i + k] & (U{0} - static_cast<U>((alive >> k) & 1)));
    }
    if (i < n) {
        const uint64_t alive = bits_at(bits, i, n);
        for (int64_t k = 0; i + k < n; ++k)
            if (!((alive >> k) & 1)) x[i + k] = 0;
    }
}

}  // namespace

void radix_count_kernel(const void* data, int64_t n, int dtype, int64_t prefix, uint32_t* counts) {
    uint32_t patterns[TILE];
    for (int64_t start = 0; start < n; start += TILE) {
        const int64_t count = n - start < TILE ? n - start : TILE;
        const void* from = at(data, start, dtype);
        const uint32_t* x = patterns;
        if (dtype == FP32) {
            x = static_cast<const uint32_t*>(from);
        } else {
            float wide[TILE];
            memcpy(patterns, as_fp32(wide, from, count, dtype),
                   static_cast<size_t>(count) * sizeof(float));
        }
        if (prefix < 0)
            count_upper(x, count, counts);
        else
            count_lower(x, count, static_cast<uint32_t>(prefix), counts);
    }
}

void keep_bits_kernel(void* data, const uint8_t* bits, int64_t n, int dtype) {
    if (dtype == FP32)
        keep(static_cast<uint32_t*>(data), bits, n);
    else if (dtype == FP64)
        keep(static_cast<uint64_t*>(data), bits, n);
    else
        keep(static_cast<uint16_t*>(data), bits, n);
}

}  // namespace pyops::PYOPS_ISA
