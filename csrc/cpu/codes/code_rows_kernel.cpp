// Few rows times weights of 4 or 8 bits: a weight is read once and widened in registers, so the
// time is that of reading the codes.
//
//   y[r, o] = sum over groups g of scale[o, g] (sum of k in g of x[r, k] (code[o, k] - zero[o, g]))
//
// Sixteen sums of a row side by side, each over its numbers in order, without fused multiplication:
// the same bits at every instruction set, and for a row whatever stands beside it. Every loop over
// registers is unrolled: otherwise they would be kept in memory.
#include "code_lanes.h"
#include "code_result.h"
#include "../rows/finish_row.h"

namespace pyops::PYOPS_ISA {
namespace {

template <int R, int O>
struct Tile {
    Sixteen sums[R][O];
    PYOPS_LANES Tile() {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int o = 0; o < O; ++o) sums[r][o] = Sixteen::all(0.0f);
    }
};

template <int R, int O>
void put(const CodeProduct& rows, int64_t r, int64_t o, const Tile<R, O>& total) {
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) put(rows, r + i, o + j, total.sums[i][j].sum());
}

// What a stretch of codes needs to lie in whole registers: the last one of a row is copied and
// zeros are put behind it.
template <int64_t BYTES>
PYOPS_LANES const uint8_t* padded(uint8_t* place, const uint8_t* codes, int64_t left) {
    if (left >= BYTES) return codes;
    memset(place, 0, BYTES);
    memcpy(place, codes, static_cast<size_t>(left));
    return place;
}

template <CodeKind KIND, int R, int O>
void bytes_tile(const CodeProduct& rows, int64_t r, int64_t o) {
    Tile<R, O> total;
    for (int64_t g = 0; g < rows.groups; ++g) {
        const int64_t begin = g * rows.group;
        const int64_t end = g + 1 < rows.groups ? begin + rows.group : rows.width;
        Tile<R, O> part;
        Sixteen zero[O];
        if (KIND == WITHOUT_SIGN) {
#pragma GCC unroll 8
            for (int j = 0; j < O; ++j)
                zero[j] = Sixteen::all(static_cast<float>(rows.zeros[(o + j) * rows.groups + g]));
        }
        for (int64_t k = begin; k < end; k += CODE_LANES) {
            Sixteen numbers[O];
#pragma GCC unroll 8
            for (int j = 0; j < O; ++j) {
                uint8_t rest[CODE_LANES];
                numbers[j] = bytes_at<KIND>(padded<CODE_LANES>(
                    rest, rows.codes + (o + j) * rows.row_bytes + k, rows.width - k));
                if (KIND == WITHOUT_SIGN) numbers[j] = numbers[j] - zero[j];
            }
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) {
                const Sixteen x = Sixteen::at(rows.x + (r + i) * rows.stride + k);
#pragma GCC unroll 8
                for (int j = 0; j < O; ++j) part.sums[i][j] = part.sums[i][j] + x * numbers[j];
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) {
            const Sixteen scale = Sixteen::all(rows.scales[(o + j) * rows.groups + g]);
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
                total.sums[i][j] = total.sums[i][j] + scale * part.sums[i][j];
        }
    }
    put(rows, r, o, total);
}

// Which group the numbers of a block of 128 belong to.
class BlockGroups {
public:
    explicit BlockGroups(const CodeProduct& rows)
        : whole_(rows.groups == 1 || rows.group % NIBBLE_BLOCK == 0),
          blocks_(rows.groups == 1 ? INT64_MAX : rows.group / NIBBLE_BLOCK) {
        if (!whole_) place(rows);
    }
    // Goes on to the next block.
    PYOPS_LANES void next(const CodeProduct& rows) {
        ++block_;
        if (!whole_)
            place(rows);
        else if (++in_group_ == blocks_)
            ++group_, in_group_ = 0;
    }
    // A number for each group, in the order of a block's registers.
    template <typename T>
    PYOPS_LANES Sixteen lanes(const T* of_row) const {
        if (whole_) return Sixteen::all(static_cast<float>(of_row[group_]));
        float lanes[CODE_LANES];
        for (int64_t d = 0; d < CODE_LANES; ++d) lanes[d] = static_cast<float>(of_row[places_[d]]);
        return Sixteen::at(lanes);
    }

private:
    void place(const CodeProduct& rows) {
        for (int64_t d = 0; d < CODE_LANES; ++d) {
            const int64_t g = (block_ * NIBBLE_BLOCK + 8 * d) / rows.group;
            places_[d] = g < rows.groups ? g : rows.groups - 1;
        }
    }
    bool whole_;
    int64_t blocks_, block_ = 0, group_ = 0, in_group_ = 0;
    int64_t places_[CODE_LANES] = {};
};

template <bool SIGNED, int R, int O>
void nibbles_tile(const CodeProduct& rows, int64_t r, int64_t o) {
    constexpr int64_t BYTES = NIBBLE_BLOCK / 2;
    Tile<R, O> total;
    const int64_t blocks = (rows.width + NIBBLE_BLOCK - 1) / NIBBLE_BLOCK;
    BlockGroups groups(rows);
    for (int64_t block = 0; block < blocks; ++block, groups.next(rows)) {
        Tile<R, O> part;
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) {
            uint8_t rest[BYTES];
            const Nibbles<SIGNED> codes(
                padded<BYTES>(rest, rows.codes + (o + j) * rows.row_bytes + block * BYTES,
                              rows.row_bytes - block * BYTES));
            Sixteen zero;
            if (!SIGNED) zero = groups.lanes(rows.zeros + (o + j) * rows.groups);
            const float* const x = rows.x + r * rows.stride + block * NIBBLE_BLOCK;
#pragma GCC unroll 8
            for (int k = 0; k < 8; ++k) {
                Sixteen numbers = codes.number(k);
                if (!SIGNED) numbers = numbers - zero;
#pragma GCC unroll 8
                for (int i = 0; i < R; ++i)
                    part.sums[i][j] = part.sums[i][j] +
                                      Sixteen::at(x + i * rows.stride + k * CODE_LANES) * numbers;
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < O; ++j) {
            const Sixteen scale = groups.lanes(rows.scales + (o + j) * rows.groups);
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
                total.sums[i][j] = total.sums[i][j] + scale * part.sums[i][j];
        }
    }
    put(rows, r, o, total);
}

template <int BITS, CodeKind KIND, int R, int O>
void tile(const CodeProduct& rows, int64_t r, int64_t o) {
    if constexpr (BITS == 8)
        bytes_tile<KIND, R, O>(rows, r, o);
    else
        nibbles_tile<KIND == WITH_SIGN, R, O>(rows, r, o);
}

template <int BITS, CodeKind KIND>
void outputs(const CodeProduct& rows, int64_t first, int64_t last) {
    int64_t o = first;
    for (; o + 4 <= last; o += 4) {
        int64_t r = 0;
        for (; r + 4 <= rows.rows; r += 4) {
            tile<BITS, KIND, 4, 2>(rows, r, o);
            tile<BITS, KIND, 4, 2>(rows, r, o + 2);
        }
        for (; r < rows.rows; ++r) tile<BITS, KIND, 1, 4>(rows, r, o);
    }
    for (; o < last; ++o)
        for (int64_t r = 0; r < rows.rows; ++r) tile<BITS, KIND, 1, 1>(rows, r, o);
}

template <CodeKind KIND>
void decode_bytes(float* __restrict out, const uint8_t* __restrict codes, int64_t n, float scale,
                  float zero) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const float number = code_number<KIND>(codes[i]);
        out[i] = scale * (KIND == WITHOUT_SIGN ? number - zero : number);
    }
}

// n is even but for the end of a row.
template <bool SIGNED>
void decode_nibbles(float* __restrict out, const uint8_t* __restrict codes, int64_t n, float scale,
                    float zero) {
    constexpr int32_t SIGN = SIGNED ? 8 : 0;
    const auto number = [=](int32_t code) {
        const float found = static_cast<float>((code ^ SIGN) - SIGN);
        return scale * (SIGNED ? found : found - zero);
    };
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n / 2; ++i) {
        out[2 * i] = number(codes[i] & 15);
        out[2 * i + 1] = number(codes[i] >> 4);
    }
    if (n % 2) out[n - 1] = number(codes[n / 2] & 15);
}

template <CodeKind KIND>
void decode_row(const CodeRows& rows, int64_t r, float* out) {
    const uint8_t* const codes = rows.codes + r * rows.row_bytes;
    for (int64_t g = 0; g < rows.groups; ++g) {
        const int64_t begin = g * rows.group;
        const int64_t end = g + 1 < rows.groups ? begin + rows.group : rows.width;
        const float scale = rows.scales[r * rows.groups + g];
        const float zero =
            KIND == WITHOUT_SIGN ? static_cast<float>(rows.zeros[r * rows.groups + g]) : 0.0f;
        if (rows.bits == 8)
            decode_bytes<KIND>(out + begin, codes + begin, end - begin, scale, zero);
        else
            decode_nibbles<KIND == WITH_SIGN>(out + begin, codes + begin / 2, end - begin, scale,
                                              zero);
    }
}

}  // namespace

void decode_rows_kernel(const CodeRows& rows, int64_t first, int64_t last, float* scratch) {
    const auto decode = rows.kind == FLOAT_E4M3  ? decode_row<FLOAT_E4M3>
                        : rows.kind == WITH_SIGN ? decode_row<WITH_SIGN>
                                                 : decode_row<WITHOUT_SIGN>;
    for (int64_t r = first; r < last; ++r) {
        void* const out = at(rows.out, r * rows.width, rows.dtype);
        float* const row = rows.dtype == FP32 ? static_cast<float*>(out) : scratch;
        decode(rows, r, row);
        from_fp32(out, row, rows.width, rows.dtype);
    }
}

void code_product_kernel(const CodeProduct& rows, int64_t first, int64_t last) {
    if (rows.kind == FLOAT_E4M3)
        outputs<8, FLOAT_E4M3>(rows, first, last);
    else if (rows.bits == 8)
        (rows.kind == WITH_SIGN ? outputs<8, WITH_SIGN> : outputs<8, WITHOUT_SIGN>)(rows, first,
                                                                                    last);
    else
        (rows.kind == WITH_SIGN ? outputs<4, WITH_SIGN> : outputs<4, WITHOUT_SIGN>)(rows, first,
                                                                                    last);
}

}  // namespace pyops::PYOPS_ISA
