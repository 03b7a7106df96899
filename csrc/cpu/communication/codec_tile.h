// For the codec kernels: a tile of at most HELD numbers of one block, fp32, in L1.
//
//   x, or row 0 + row 1 + ...  ->  (times scale)  ->  + error  ->  tile
#pragma once
#include "../../host/communication/codec.h"
#include "../rows/vector.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t HELD = 2048;

// Payloads may begin at any address.
inline float scale_at(const uint8_t* payload, int64_t block) {
    float scale;
    memcpy(&scale, payload + 4 * block, 4);
    return scale;
}
inline void put_scale(uint8_t* payload, int64_t block, float scale) {
    memcpy(payload + 4 * block, &scale, 4);
}

// tile = (row 0 + row 1) + row 2 + ... of elements [begin, begin + n), all of one block, yet
// without the factor.
// decode(out, span, row, begin, n, add) writes one row's numbers, or adds them.
template <typename Decode>
inline void add_rows(float* __restrict tile, const CodecSpan& span, int64_t begin, int64_t n,
                     const Decode& decode) {
    for (int row = 0; row < span.num_rows; ++row) decode(tile, span, row, begin, n, row > 0);
}

inline void multiply(float* out, const float* tile, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) out[i] = tile[i] * scale;
}

// The same past the caches, so that the lines of `out` are not fetched first.
inline void multiply_streamed(float* __restrict out, const float* __restrict tile, int64_t n,
                              float scale) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i < n && reinterpret_cast<uintptr_t>(out + i) % 64; ++i) out[i] = tile[i] * scale;
    for (; i + 16 <= n; i += 16)
        _mm512_stream_ps(out + i, _mm512_mul_ps(_mm512_loadu_ps(tile + i), _mm512_set1_ps(scale)));
#elif defined(__AVX2__)
    for (; i < n && reinterpret_cast<uintptr_t>(out + i) % 32; ++i) out[i] = tile[i] * scale;
    for (; i + 8 <= n; i += 8)
        _mm256_stream_ps(out + i, _mm256_mul_ps(_mm256_loadu_ps(tile + i), _mm256_set1_ps(scale)));
#endif
    for (; i < n; ++i) out[i] = tile[i] * scale;
}

inline void add_scaled(float* out, const float* tile, const float* other, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const float value = tile[i] * scale;
        out[i] = other[i] + value;
    }
}

// u of elements [begin, begin + n): in `tile`, or where it is.
template <typename Decode>
inline const float* source_of(float* tile, const CodecSpan& span, int64_t begin, int64_t n,
                              const Decode& decode) {
    const float* source = tile;
    if (span.x)
        source = as_fp32(tile, at(span.x, begin, span.dtype), n, span.dtype);
    else
        add_rows(tile, span, begin, n, decode);
    const float* error = span.error + begin;
    const float scale = span.scale;  // 1 for x
    if (!span.error && span.x) return source;
    if (!span.error)
        multiply(tile, tile, n, scale);
    else
        add_scaled(tile, source, error, n, scale);
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
            add_rows(tile, span, begin, n, decode);
            char* const out = at(span.out, begin, span.dtype_out);
            float* const result = span.dtype_out == FP32 ? reinterpret_cast<float*>(out) : tile;
            if (span.accumulate)
                add_scaled(result, tile, as_fp32(old, out, n, span.dtype_out), n, span.scale);
            else if (result != tile && span.streams)
                multiply_streamed(result, tile, n, span.scale);
            else
                multiply(result, tile, n, span.scale);
            from_fp32(out, result, n, span.dtype_out);
        }
    }
    if (span.streams) fence_streams();
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
