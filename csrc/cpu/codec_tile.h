// For the codec kernels: a tile of at most HELD numbers of one block, fp32, in L1.
//
//   x, or row 0 + row 1 + ...  ->  (times scale)  ->  + error  ->  tile
#pragma once
#include "codec.h"
#include "vector.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t HELD = 2048;

// Payloads may begin at any address.
inline float scale_at(const uint8_t* payload, int64_t block) {
    float scale;
    memcpy(&scale, payload + 4 * block, 4);
    return scale;
}
inline void put_scale(uint8_t* payload, int64_t block, float scale) { memcpy(payload + 4 * block, &scale, 4); }

// tile = scale * (((row 0 + row 1) + row 2) + ...) of elements [begin, begin + n), all of one block.
// decode(out, span, row, begin, n, add) writes one row's numbers, or adds them.
template <typename Decode>
inline void sum_rows_of(float* __restrict tile, const CodecSpan& span, int64_t begin, int64_t n, const Decode& decode) {
    for (int row = 0; row < span.num_rows; ++row) decode(tile, span, row, begin, n, row > 0);
    const float scale = span.scale;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) tile[i] *= scale;
}

// u of elements [begin, begin + n): in `tile`, or where it is.
template <typename Decode>
inline const float* source_of(float* __restrict tile, const CodecSpan& span, int64_t begin, int64_t n, const Decode& decode) {
    const float* source = tile;
    if (span.x) source = as_fp32(tile, at(span.x, begin, span.dtype), n, span.dtype);
    else sum_rows_of(tile, span, begin, n, decode);
    if (!span.error) return source;
    const float* error = span.error + begin;
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) tile[i] = source[i] + error[i];
    return tile;
}

// out (+)= the sum of rows, blocks [first, last).
template <typename Decode>
inline void sum_blocks(const CodecSpan& span, int64_t first, int64_t last, const Decode& decode) {
    alignas(64) float tile[HELD], old[HELD];
    const int64_t end = last * span.block < span.n ? last * span.block : span.n;
    for (int64_t block = first; block < last; ++block) {
        const int64_t stop = (block + 1) * span.block < end ? (block + 1) * span.block : end;
        for (int64_t begin = block * span.block; begin < stop; begin += HELD) {
            const int64_t n = stop - begin < HELD ? stop - begin : HELD;
            sum_rows_of(tile, span, begin, n, decode);
            char* const out = at(span.out, begin, span.dtype_out);
            if (span.accumulate) {
                const float* before = as_fp32(old, out, n, span.dtype_out);
                PYOPS_VECTORISE
                for (int64_t i = 0; i < n; ++i) tile[i] = before[i] + tile[i];
            }
            from_fp32(out, tile, n, span.dtype_out);
        }
    }
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
