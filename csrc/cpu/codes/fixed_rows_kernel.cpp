// Few rows of whole numbers times weights of 4 or 8 bits that are whole numbers, too.
//
//   one scale a row     y = unit scale[o] (sum of X (code[o] - zero[o]))       the sum is exact
//   a scale a group     y = unit (sum over g of scale[o, g] (sum over k in g of X code[o, k]))
//
// In groups, the sums of eight numbers of a block of 128 are exact; of these there are sixteen side
// by side, which are multiplied with the group's scale and added in order, without fused
// multiplication: the same bits at every instruction set, and for a row whatever stands beside it.
#include "fixed_rows.h"

#include "byte_dots.h"
#include "code_result.h"
#include "coded_row.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t CHUNK_BYTES = FIXED_DIGITS * FIXED_CHUNK;
// How far before their use codes are fetched, in bytes. A tile reads four short stretches, which
// end before the processor recognizes them as streams.
constexpr int64_t FETCHED_AHEAD = 8192;

inline void put_digits(int8_t* to, int32_t number) {
    const int32_t first = static_cast<int8_t>(number);
    const int32_t rest = (number - first) >> 8, second = static_cast<int8_t>(rest);
    to[0] = static_cast<int8_t>(first);
    to[FIXED_CHUNK] = static_cast<int8_t>(second);
    to[2 * FIXED_CHUNK] = static_cast<int8_t>((rest - second) >> 8);
}

// 64 numbers, of which `left` are there, every `step`th of x.
inline int64_t chunk_of(int8_t* to, const float* x, int64_t left, int64_t step, float factor,
                        int32_t* numbers) {
    const int64_t n = left < FIXED_CHUNK ? left : FIXED_CHUNK;
    int64_t sum = 0;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i)
        numbers[i] = static_cast<int32_t>(__builtin_rintf(x[step * i] * factor));
    for (int64_t i = n; i < FIXED_CHUNK; ++i) numbers[i] = 0;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < FIXED_CHUNK; ++i) put_digits(to + i, numbers[i]);
    PYOPS_VECTORISE
    for (int64_t i = 0; i < FIXED_CHUNK; ++i) sum += numbers[i];
    return sum;
}

void fixed_row(const FixedRows& rows, int64_t r) {
    const float* const x = rows.x + r * rows.width;
    const float largest = float_of(largest_of(x, rows.width, 0));
    const bool finite = largest < INFINITY;
    // Of a row of tiny numbers the factor would be beyond the largest float
    const float wanted = largest > 0.0f ? FIXED_LARGEST / largest : 1.0f;
    const float factor = !finite ? 0.0f : wanted < 0x1p126f ? wanted : 0x1p126f;
    rows.units[r] = finite ? 1.0 / static_cast<double>(factor) : NAN;
    const int64_t step = rows.bits == 4 ? 2 : 1;
    int64_t sum = 0;
    int32_t numbers[2][FIXED_CHUNK];
    for (int64_t c = 0; c < rows.chunks; ++c) {
        int8_t* const to = rows.digits + (r * rows.chunks + c) * CHUNK_BYTES;
        if (!finite) {
            memset(to, 0, CHUNK_BYTES);
            continue;
        }
        const int64_t half = step == 2 ? c % 2 : 0, from = c / step * step * FIXED_CHUNK + half,
                      left = rows.width > from ? (rows.width - from + step - 1) / step : 0;
        sum += chunk_of(to, x + from, left, step, factor, numbers[half]);
        if (!rows.offsets || !half) continue;
        int32_t* const offsets = rows.offsets + (r * rows.chunks + c) / 2 * CODE_LANES;
        for (int64_t d = 0; d < CODE_LANES; ++d) {
            int32_t eight = 0;
            for (int64_t k = 4 * d; k < 4 * d + 4; ++k) eight += numbers[0][k] + numbers[1][k];
            offsets[d] = -8 * eight;
        }
    }
    if (rows.offsets && !finite)
        memset(rows.offsets + r * rows.chunks / 2 * CODE_LANES, 0,
               static_cast<size_t>(rows.chunks / 2 * CODE_LANES) * sizeof(int32_t));
    rows.sums[r] = sum;
}

// 64 bytes of codes for each of some outputs; the last ones of a row are copied, and zeros put
// behind.
template <int O>
struct CodeBlock {
    const uint8_t* codes;
    int64_t stride;
    uint8_t place[O * FIXED_CHUNK];

    PYOPS_LANES CodeBlock(const CodeProduct& rows, int64_t o)
        : codes(rows.codes + o * rows.row_bytes), stride(rows.row_bytes) {}
    PYOPS_LANES Bytes of(int j, uint8_t flip) const {
        const uint8_t* const own = codes + j * stride;
        // As a number: it may lie behind the codes, where a prefetch does nothing but a pointer
        // must not point.
        const uintptr_t later = reinterpret_cast<uintptr_t>(own) + FETCHED_AHEAD;
        __builtin_prefetch(reinterpret_cast<const void*>(later));
        return Bytes::at(own, flip);
    }
    PYOPS_LANES void next() { codes += FIXED_CHUNK; }
    PYOPS_LANES void last(int64_t left) {
        memset(place, 0, sizeof place);
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j)
            memcpy(place + j * FIXED_CHUNK, codes + j * stride, static_cast<size_t>(left));
        codes = place;
        stride = FIXED_CHUNK;
    }
};

template <bool NIBBLES, int R, int O>
PYOPS_DOTS PYOPS_LANES void add_block(Words (&sums)[R][O][FIXED_DIGITS], const CodeBlock<O>& block,
                                      const int8_t* digits, int64_t row_digits, uint8_t flip) {
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) {
        const Bytes codes = block.of(j, flip);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
            for (int d = 0; d < FIXED_DIGITS; ++d) {
                const int8_t* const own = digits + i * row_digits + d * FIXED_CHUNK;
                Words& sum = sums[i][j][d];
                sum = dot<NIBBLES>(sum, NIBBLES ? codes.low() : codes, own);
                if (NIBBLES) sum = dot<true>(sum, codes.high(), own + CHUNK_BYTES);
            }
    }
}

// One scale for each output.
template <bool NIBBLES, int R, int O>
PYOPS_DOTS void whole_tile(const CodeProduct& rows, const FixedRows& x, int64_t r, int64_t o) {
    const uint8_t flip = rows.kind == WITHOUT_SIGN ? 0 : NIBBLES ? 0x88 : 0x80;
    const int64_t row_digits = x.chunks * CHUNK_BYTES;
    const int8_t* digits = x.digits + r * row_digits;
    CodeBlock<O> block(rows, o);
    Words sums[R][O][FIXED_DIGITS];
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j)
#pragma GCC unroll 8
            for (int d = 0; d < FIXED_DIGITS; ++d) sums[i][j][d] = Words::zero();
    int64_t left = rows.row_bytes;
    for (; left >= FIXED_CHUNK; left -= FIXED_CHUNK, block.next()) {
        add_block<NIBBLES, R, O>(sums, block, digits, row_digits, flip);
        digits += CHUNK_BYTES * (NIBBLES ? 2 : 1);
    }
    if (left) {
        block.last(left);
        add_block<NIBBLES, R, O>(sums, block, digits, row_digits, flip);
    }
#pragma GCC unroll 8
    for (int j = 0; j < O; ++j) {
        const double zero = rows.kind == WITHOUT_SIGN ? static_cast<double>(rows.zeros[o + j])
                            : NIBBLES                 ? 8.0
                                                      : 128.0;
        const double scale = static_cast<double>(rows.scales[o + j]);
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
            const double sum = static_cast<double>(number_of(sums[i][j])),
                         number = sum - zero * static_cast<double>(x.sums[r + i]);
            put(rows, r + i, o + j, static_cast<float>(number * scale * x.units[r + i]));
        }
    }
}

// Scales of groups, of codes of 4 bits with a sign; a group is some whole blocks.
template <int R, int O>
PYOPS_DOTS void group_tile(const CodeProduct& rows, const FixedRows& x, int64_t r, int64_t o) {
    const int64_t each = rows.group / NIBBLE_BLOCK;
    Sixteen total[R][O];
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) total[i][j] = Sixteen::all(0.0f);
    CodeBlock<O> bytes(rows, o);
    for (int64_t g = 0; g < rows.groups; ++g)
        for (int64_t block = g * each; block < (g + 1) * each; ++block, bytes.next())
#pragma GCC unroll 8
            for (int j = 0; j < O; ++j) {
                const Bytes codes = bytes.of(j, 0x88);
                const Bytes low = codes.low(), high = codes.high();
                const Sixteen scale = Sixteen::all(rows.scales[(o + j) * rows.groups + g]);
#pragma GCC unroll 8
                for (int i = 0; i < R; ++i) {
                    const int64_t at = (r + i) * x.chunks + 2 * block;
                    const int8_t* const digits = x.digits + at * CHUNK_BYTES;
                    Words sum = Words::zero();
#pragma GCC unroll 8
                    for (int d = FIXED_DIGITS - 1; d >= 0; --d) {
                        sum = dot<true>(sum, low, digits + d * FIXED_CHUNK);
                        sum = dot<true>(sum, high, digits + CHUNK_BYTES + d * FIXED_CHUNK);
                        if (d) sum = sum.times_256();
                    }
                    sum = sum.plus(x.offsets + at / 2 * CODE_LANES);
                    total[i][j] = total[i][j] + scale * sum.numbers();
                }
            }
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) {
            const double sum = static_cast<double>(total[i][j].sum());
            put(rows, r + i, o + j, static_cast<float>(sum * x.units[r + i]));
        }
}

template <bool NIBBLES, bool GROUPS, int R, int O>
PYOPS_DOTS void tile(const CodeProduct& rows, const FixedRows& x, int64_t r, int64_t o) {
    if constexpr (GROUPS)
        group_tile<R, O>(rows, x, r, o);
    else
        whole_tile<NIBBLES, R, O>(rows, x, r, o);
}

template <bool NIBBLES, bool GROUPS>
PYOPS_DOTS void outputs(const CodeProduct& rows, const FixedRows& x, int64_t first, int64_t last) {
    int64_t o = first;
    for (; o + 4 <= last; o += 4) {
        int64_t r = 0;
        for (; r + 2 <= rows.rows; r += 2) {
            tile<NIBBLES, GROUPS, 2, 2>(rows, x, r, o);
            tile<NIBBLES, GROUPS, 2, 2>(rows, x, r, o + 2);
        }
        for (; r < rows.rows; ++r) tile<NIBBLES, GROUPS, 1, 4>(rows, x, r, o);
    }
    for (; o < last; ++o)
        for (int64_t r = 0; r < rows.rows; ++r) tile<NIBBLES, GROUPS, 1, 1>(rows, x, r, o);
}

PYOPS_DOTS void product(const CodeProduct& rows, const FixedRows& x, int64_t first, int64_t last) {
    if (rows.bits == 8)
        outputs<false, false>(rows, x, first, last);
    else if (rows.groups == 1)
        outputs<true, false>(rows, x, first, last);
    else
        outputs<true, true>(rows, x, first, last);
}

}  // namespace

void fixed_rows_kernel(const FixedRows& rows, int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) fixed_row(rows, r);
}

#if defined(__AVX512F__)
}  // namespace pyops::PYOPS_ISA
namespace pyops::avx2 {
void fixed_product_kernel(const CodeProduct&, const FixedRows&, int64_t, int64_t);
}
namespace pyops::PYOPS_ISA {
#endif

void fixed_product_kernel(const CodeProduct& rows, const FixedRows& x, int64_t first,
                          int64_t last) {
#if defined(__AVX512F__)
    if (!__builtin_cpu_supports("avx512vnni"))
        return avx2::fixed_product_kernel(rows, x, first, last);
#endif
    product(rows, x, first, last);
}

}  // namespace pyops::PYOPS_ISA
