// A linear layer of int8 codes: products, and the sums made numbers while they are in registers.
//
//   many rows   a panel of 32 outputs is laid out as [inner / 4][32][4] and stays in the caches; a
//               tile of 12 rows and 32 outputs has 24 registers of sums
//   few rows    rows of weights as they lie, 64 numbers at a time
//
// The instruction (vpdpbusd) multiplies unsigned by signed bytes: weights go in with 128 added, and
// 128 times the sum of the row of codes is taken off. All of it is exact, so that every way gives
// the same bits.
#include "finish_row.h"
#include "int8_linear.h"
#include "scale_row.h"

namespace pyops::PYOPS_ISA {
namespace {

// The sums of row r with the outputs from `first` on, as they are stored.
void put_row(const Int8Linear& layer, int64_t r, int64_t first, int64_t n, const int32_t* acc) {
    const ScaledSums& sums = layer.sums;
    alignas(64) float row[PANEL];
    scale_row(row, acc, sums, r, first, n);
    const int64_t at = r * layer.outputs + first;
    with_storage(sums.dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        if constexpr (sizeof(S) < 8) {
            S* const out = static_cast<S*>(sums.out) + at;
            if (sums.activation >= 0 || sizeof(S) < 4)
                finish_row(out, row, n, sums.activation);
            else
                memcpy(out, row, static_cast<size_t>(n) * sizeof(float));
        }
    });
}

void plain_panel(const Int8Linear& layer, int64_t first, int64_t n, int64_t from, int64_t to) {
    for (int64_t r = from; r < to; ++r) {
        const int8_t* const a = layer.a + r * layer.inner;
        int32_t acc[PANEL];
        for (int64_t j = 0; j < n; ++j) {
            const int8_t* const w = layer.weight + (first + j) * layer.inner;
            int32_t sum = 0;
            PYOPS_VECTORISE
            for (int64_t k = 0; k < layer.inner; ++k)
                sum += static_cast<int32_t>(a[k]) * static_cast<int32_t>(w[k]);
            acc[j] = sum;
        }
        put_row(layer, r, first, n, acc);
    }
}

#if defined(__AVX512F__)
#define PYOPS_VNNI __attribute__((target("avx512vnni")))

constexpr int64_t FEW = 8;

// The first n < 64 bytes, zeros behind them.
inline __m512i some_bytes(const void* p, int64_t n) {
    return _mm512_maskz_loadu_epi8((__mmask64{1} << n) - 1, p);
}

inline uint32_t word_at(const int8_t* p, int64_t left) {
    uint32_t word = 0;
    memcpy(&word, p, left < 4 ? static_cast<size_t>(left) : 4);
    return word;
}

// 128 times the sum of a row of codes.
PYOPS_VNNI uint32_t shifted_sum(const int8_t* a, int64_t inner) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    int64_t k = 0;
    for (; k + 64 <= inner; k += 64)
        sum = _mm512_dpbusd_epi32(sum, ones, _mm512_loadu_si512(a + k));
    if (k < inner) sum = _mm512_dpbusd_epi32(sum, ones, some_bytes(a + k, inner - k));
    return 128u * static_cast<uint32_t>(_mm512_reduce_add_epi32(sum));
}

// 16 rows of weights from `first` on, 64 numbers of each, as [16][16][4] of the panel at `to`.
void lay_out(uint8_t* to, const Int8Linear& layer, int64_t first, int64_t n, int64_t k) {
    const int64_t left = layer.inner - k;
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(0x80));
    __m512i r[16], t[16];
    for (int64_t j = 0; j < 16; ++j) {
        const int8_t* const w = layer.weight + (first + j) * layer.inner + k;
        r[j] = j >= n       ? _mm512_setzero_si512()
               : left >= 64 ? _mm512_loadu_si512(w)
                            : some_bytes(w, left);
        r[j] = _mm512_xor_si512(r[j], shift);
    }
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xDD);
    }
    for (int64_t i = 0; i < 16 && k + 4 * i < layer.inner; ++i)
        _mm512_store_si512(to + i * 4 * PANEL, r[i]);
}

template <int R>
PYOPS_VNNI void panel_tile(const Int8Linear& layer, const uint8_t* panel, int64_t r, int64_t first,
                           int64_t n) {
    __m512i sums[R][2];
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) sums[i][0] = sums[i][1] = _mm512_setzero_si512();
    const int8_t* const a = layer.a + r * layer.inner;
    const int64_t whole = layer.inner / 4 * 4;
    for (int64_t k = 0; k < whole; k += 4) {
        const __m512i low = _mm512_load_si512(panel + k * PANEL);
        const __m512i high = _mm512_load_si512(panel + k * PANEL + 64);
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) {
            int32_t word;
            memcpy(&word, a + i * layer.inner + k, 4);
            const __m512i four = _mm512_set1_epi32(word);
            sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], low, four);
            sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], high, four);
        }
    }
    for (int i = 0; i < R; ++i) {
        const int8_t* const row = a + i * layer.inner;
        if (whole < layer.inner) {
            const __m512i four =
                _mm512_set1_epi32(static_cast<int32_t>(word_at(row + whole, layer.inner - whole)));
            sums[i][0] =
                _mm512_dpbusd_epi32(sums[i][0], _mm512_load_si512(panel + whole * PANEL), four);
            sums[i][1] = _mm512_dpbusd_epi32(sums[i][1],
                                             _mm512_load_si512(panel + whole * PANEL + 64), four);
        }
        const __m512i shift =
            _mm512_set1_epi32(static_cast<int32_t>(shifted_sum(row, layer.inner)));
        alignas(64) int32_t acc[PANEL];
        _mm512_store_si512(acc, _mm512_sub_epi32(sums[i][0], shift));
        _mm512_store_si512(acc + 16, _mm512_sub_epi32(sums[i][1], shift));
        put_row(layer, r + i, first, n, acc);
    }
}

PYOPS_VNNI void vnni_panel(const Int8Linear& layer, int64_t first, int64_t n, int64_t from,
                           int64_t to, uint8_t* panel) {
    for (int64_t k = 0; k < layer.inner; k += 64)
        for (int64_t half = 0; half < PANEL; half += 16)
            lay_out(panel + k * PANEL + 4 * half, layer, first + half, n - half, k);
    int64_t r = from;
    for (; r + 12 <= to; r += 12) panel_tile<12>(layer, panel, r, first, n);
    for (; r + 4 <= to; r += 4) panel_tile<4>(layer, panel, r, first, n);
    for (; r < to; ++r) panel_tile<1>(layer, panel, r, first, n);
}

// Rows of weights as they lie, for few rows of codes.
template <int R>
PYOPS_VNNI void dot_tile(const Int8Linear& layer, int64_t r, int64_t first, int64_t n) {
    const __m512i shift = _mm512_set1_epi8(static_cast<char>(0x80));
    int32_t acc[R][PANEL];
    uint32_t shifted[R];
    for (int i = 0; i < R; ++i)
        shifted[i] = shifted_sum(layer.a + (r + i) * layer.inner, layer.inner);
    for (int64_t j = 0; j < n; ++j) {
        const int8_t* const w = layer.weight + (first + j) * layer.inner;
        __m512i sums[R];
#pragma GCC unroll 16
        for (int i = 0; i < R; ++i) sums[i] = _mm512_setzero_si512();
        int64_t k = 0;
        for (; k + 64 <= layer.inner; k += 64) {
            const __m512i codes = _mm512_xor_si512(_mm512_loadu_si512(w + k), shift);
#pragma GCC unroll 16
            for (int i = 0; i < R; ++i)
                sums[i] = _mm512_dpbusd_epi32(
                    sums[i], codes, _mm512_loadu_si512(layer.a + (r + i) * layer.inner + k));
        }
        if (k < layer.inner) {
            const __m512i codes = _mm512_xor_si512(some_bytes(w + k, layer.inner - k), shift);
            for (int i = 0; i < R; ++i)
                sums[i] = _mm512_dpbusd_epi32(
                    sums[i], codes,
                    some_bytes(layer.a + (r + i) * layer.inner + k, layer.inner - k));
        }
        for (int i = 0; i < R; ++i)
            acc[i][j] = static_cast<int32_t>(
                static_cast<uint32_t>(_mm512_reduce_add_epi32(sums[i])) - shifted[i]);
    }
    for (int i = 0; i < R; ++i) put_row(layer, r + i, first, n, acc[i]);
}
#endif

}  // namespace

void int8_linear_kernel(const Int8Linear& layer, int64_t panel, int64_t from, int64_t to,
                        void* scratch) {
    const int64_t first = panel * PANEL;
    const int64_t n = layer.outputs - first < PANEL ? layer.outputs - first : PANEL;
#if defined(__AVX512F__)
    if (layer.vnni && to - from <= FEW) {
        int64_t r = from;
        for (; r + 4 <= to; r += 4) dot_tile<4>(layer, r, first, n);
        for (; r < to; ++r) dot_tile<1>(layer, r, first, n);
        return;
    }
    if (layer.vnni) {
        const uintptr_t place = (reinterpret_cast<uintptr_t>(scratch) + 63) / 64 * 64;
        return vnni_panel(layer, first, n, from, to, reinterpret_cast<uint8_t*>(place));
    }
#endif
    (void)scratch;
    plain_panel(layer, first, n, from, to);
}

}  // namespace pyops::PYOPS_ISA
