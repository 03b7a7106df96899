// Products of small matrices for attention, and how its tiles come into L1: as W (fp32, or float64)
// whatever they are in memory, rows padded to a whole number of registers.
//
//   C[r][c] (+)= sum over x of A(r, x) B[x][c]      A(r, x) = a[r a_row + x a_depth]: either way up
//
//   MR rows x NV registers of C stay in registers while x goes over the depth; a number of A is
//   spread over a register, B is read register by register. An element is one chain of fused
//   operations in ascending x, whatever tile of C it stands in; a sum that goes on is added to at
//   the end, so that the chains stay short.
#pragma once
#include "attention.h"
#include "../rows/rows.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t QT = ATTENTION_TILE;
constexpr int64_t WIDTH_UNIT = 16;  // rows are padded to a multiple
#if defined(__AVX512F__)
constexpr int MR = 8;
#else
constexpr int MR = 4;
#endif

inline int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <typename W>
struct Factor {
    const W* at;
    int64_t row, depth;
};

template <typename W, int NV, bool ADD>
inline __attribute__((always_inline)) void block_product(W* c, int64_t ldc, const Factor<W>& a,
                                                         const W* b, int64_t ldb, int64_t depth) {
    using V = Wide<W>;
    V sum[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) sum[r][n] = V(W(0));
    const W* column = a.at;
    for (int64_t x = 0; x < depth; ++x) {
        V right[NV];
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) load(right[n], b + n * V::N);
#pragma GCC unroll 8
        for (int r = 0; r < MR; ++r) {
            const V left(column[r * a.row]);
#pragma GCC unroll 2
            for (int n = 0; n < NV; ++n) sum[r][n] = fused(left, right[n], sum[r][n]);
        }
        column += a.depth;
        b += ldb;
    }
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) {
            W* const out = c + r * ldc + n * V::N;
            if (ADD) {
                V before;
                load(before, out);
                sum[r][n] = before + sum[r][n];
            }
            store(out, sum[r][n]);
        }
}

// C of `rows` (a multiple of MR, or room for one) and `columns` (a multiple of WIDTH_UNIT).
template <bool ADD, typename W>
void product(W* c, int64_t ldc, int64_t rows, int64_t columns, const Factor<W>& a, const W* b,
             int64_t ldb, int64_t depth) {
    constexpr int64_t N = Wide<W>::N;
    int64_t column = 0;
    for (; column + 2 * N <= columns; column += 2 * N)
        for (int64_t r = 0; r < rows; r += MR)
            block_product<W, 2, ADD>(c + r * ldc + column, ldc, {a.at + r * a.row, a.row, a.depth},
                                     b + column, ldb, depth);
    for (; column < columns; column += N)
        for (int64_t r = 0; r < rows; r += MR)
            block_product<W, 1, ADD>(c + r * ldc + column, ldc, {a.at + r * a.row, a.row, a.depth},
                                     b + column, ldb, depth);
}

// The same, number by number, over the x that row r sees alone: for factors that hold inf or nan
// where nothing may come of it. Bit x of seen[r], or bit r of seen[x].
template <typename W>
void seen_product(W* c, int64_t ldc, int64_t rows, int64_t columns, const Factor<W>& a, const W* b,
                  int64_t ldb, int64_t depth, const uint64_t* seen, bool by_row) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t x = 0; x < depth; ++x) {
            if (!((by_row ? seen[r] >> x : seen[x] >> r) & 1)) continue;
            const W left = a.at[r * a.row + x * a.depth];
            for (int64_t n = 0; n < columns; ++n)
                c[r * ldc + n] = fused(left, b[x * ldb + n], c[r * ldc + n]);
        }
}

template <typename W>
bool all_finite(const W* x, int64_t n) {
    W sum = 0;  // of zeros, or of nan
    W lanes[WIDTH_UNIT] = {};
    for (int64_t i = 0; i < n; i += WIDTH_UNIT)
        for (int64_t j = 0; j < WIDTH_UNIT; ++j) lanes[j] += x[i + j] - x[i + j];
    for (const W lane : lanes) sum += lane;
    return sum == W(0);
}

// Rows [first, first + count) of head `head`, times `scale`, and zeros up to `room` rows.
template <typename S>
void load_tile(Real<S>* out, int64_t ld, const AttentionTensor& from, int64_t b, int64_t first,
               int64_t count, int64_t head, int64_t K, double scale, int64_t room) {
    using W = Real<S>;
    const W factor = static_cast<W>(scale);
    const S* row =
        static_cast<const S*>(from.data) + b * from.batch + first * from.row + head * from.head;
    for (int64_t r = 0; r < count; ++r, row += from.row, out += ld) {
        for_each_of<S>(K, [=](auto lane, int64_t i) __attribute__((always_inline)) {
            typename decltype(lane)::type x;
            load(x, row + i);
            store(out + i, x * decltype(x)(factor));
        });
        for (int64_t i = K; i < ld; ++i) out[i] = W(0);
    }
    if (room > count) memset(out, 0, static_cast<size_t>((room - count) * ld) * sizeof(W));
}

template <typename S>
void store_row(S* out, const Real<S>* row, int64_t K, Real<S> factor) {
    for_each_of<S>(K, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type x;
        load(x, row + i);
        store(out + i, x * decltype(x)(factor));
    });
}

#if defined(__AVX2__)
inline void transpose8(float* out, int64_t ldo, const float* in, int64_t ldi) {
    __m256 r[8], t[8];
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) r[k] = _mm256_loadu_ps(in + k * ldi);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        t[2 * k] = _mm256_unpacklo_ps(r[2 * k], r[2 * k + 1]);
        t[2 * k + 1] = _mm256_unpackhi_ps(r[2 * k], r[2 * k + 1]);
    }
#pragma GCC unroll 2
    for (int k = 0; k < 2; ++k) {
        r[4 * k] = _mm256_shuffle_ps(t[4 * k], t[4 * k + 2], 0x44);
        r[4 * k + 1] = _mm256_shuffle_ps(t[4 * k], t[4 * k + 2], 0xEE);
        r[4 * k + 2] = _mm256_shuffle_ps(t[4 * k + 1], t[4 * k + 3], 0x44);
        r[4 * k + 3] = _mm256_shuffle_ps(t[4 * k + 1], t[4 * k + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
        _mm256_storeu_ps(out + k * ldo, _mm256_permute2f128_ps(r[k], r[k + 4], 0x20));
        _mm256_storeu_ps(out + (k + 4) * ldo, _mm256_permute2f128_ps(r[k], r[k + 4], 0x31));
    }
}
#endif

// out [K, QT] of in [QT, ld].
template <typename W>
void transpose_tile(W* out, const W* in, int64_t ld, int64_t K) {
    int64_t done = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(W) == 4)
        for (; done + 8 <= K; done += 8)
            for (int64_t r = 0; r < QT; r += 8)
                transpose8(out + done * QT + r, QT, in + r * ld + done, ld);
#endif
    for (; done < K; ++done)
        for (int64_t r = 0; r < QT; ++r) out[done * QT + r] = in[r * ld + done];
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
