// One bit per number: a block is read once, summed and packed in L1, and only its error is written
// back.
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "../../math/communication/onebit.h"
#include "codec_tile.h"

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t LANES = ONEBIT_LANES;
typedef float Floats __attribute__((vector_size(32)));
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Longs __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(32)));

// lanes[i % LANES] += term(u[i]), in ascending order of i.
template <int RULE>
void add_lanes(double* __restrict lanes, const float* __restrict u, int64_t n) {
    const int64_t whole = n / LANES * LANES;
    for (int64_t lane = 0; lane < LANES; lane += 8) {
        Doubles sum;
        memcpy(&sum, lanes + lane, sizeof sum);
        for (int64_t i = lane; i < whole; i += LANES) {
            Floats x;
            memcpy(&x, u + i, sizeof x);
            const Doubles wide = __builtin_convertvector(x, Doubles);
            sum += RULE == RMS ? wide * wide : (Doubles)((Longs)wide & 0x7FFFFFFFFFFFFFFFl);
        }
        memcpy(lanes + lane, &sum, sizeof sum);
    }
    for (int64_t i = whole; i < n; ++i) lanes[i - whole] += onebit_term(u[i], RULE);
}

double total(double* lanes) {
    for (int64_t half = LANES / 2; half > 0; half /= 2)
        for (int64_t k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    return lanes[0];
}

// Bit i of `bits` is u[i] >= 0; the bits beyond n in the last byte are 0.
void pack_signs(uint8_t* __restrict bits, const float* __restrict u, int64_t n) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        const uint16_t sixteen =
            _mm512_cmp_ps_mask(_mm512_loadu_ps(u + i), _mm512_setzero_ps(), _CMP_GE_OQ);
        memcpy(bits + i / 8, &sixteen, 2);
    }
#elif defined(__AVX2__)
    for (; i + 8 <= n; i += 8)
        bits[i / 8] = static_cast<uint8_t>(_mm256_movemask_ps(
            _mm256_cmp_ps(_mm256_loadu_ps(u + i), _mm256_setzero_ps(), _CMP_GE_OQ)));
#elif defined(__SSE2__)
    for (; i + 8 <= n; i += 8) {
        const int low = _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(u + i), _mm_setzero_ps()));
        bits[i / 8] = static_cast<uint8_t>(
            low | _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(u + i + 4), _mm_setzero_ps())) << 4);
    }
#endif
    for (; i < n; i += 8) {
        unsigned byte = 0;
        for (int64_t k = 0; k < 8 && i + k < n; ++k)
            byte |= static_cast<unsigned>(u[i + k] >= 0.0f) << k;
        bits[i / 8] = static_cast<uint8_t>(byte);
    }
}

// out = +-scale by the bits, or out += that.
template <bool ADD>
void unpack_signs(float* __restrict out, const uint8_t* __restrict bits, int64_t n, float scale) {
    const int32_t plus = static_cast<int32_t>(bits_of(scale));
    const Ints select = {1, 2, 4, 8, 16, 32, 64, 128};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const Ints byte = Ints{} + static_cast<int32_t>(bits[i / 8]);
        const Ints value = (((byte & select) == 0) & static_cast<int32_t>(0x80000000u)) ^ plus;
        Floats sum = (Floats)value;
        if (ADD) {
            Floats before;
            memcpy(&before, out + i, sizeof before);
            sum = before + sum;
        }
        memcpy(out + i, &sum, sizeof sum);
    }
    for (; i < n; ++i) {
        const float value = onebit_value(scale, (bits[i / 8] >> (i % 8)) & 1);
        out[i] = ADD ? out[i] + value : value;
    }
}

void decode_row(float* out, const CodecSpan& span, int row, int64_t begin, int64_t n, bool add) {
    const uint8_t* payload = span.rows[row];
    const uint8_t* bits = payload + (span.row_scales ? 0 : 4 * span.blocks()) + begin / 8;
    const float scale =
        span.row_scales ? span.row_scales[row] : scale_at(payload, begin / span.block);
    if (add)
        unpack_signs<true>(out, bits, n, scale);
    else
        unpack_signs<false>(out, bits, n, scale);
}

void store_error(float* __restrict error, const float* __restrict u, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) error[i] = onebit_error(u[i], scale);
}

// The same, but what would not be finite is left as it was.
void store_finite_error(float* __restrict error, const float* __restrict u, int64_t n,
                        float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const float e = onebit_error(u[i], scale);
        error[i] = (bits_of(e) & 0x7F800000u) == 0x7F800000u ? error[i] : e;
    }
}

template <int RULE>
bool encode_block(const CodecSpan& span, int64_t block, uint8_t* bits) {
    alignas(64) float tile[HELD];
    double lanes[LANES] = {};
    const int64_t begin = block * span.block,
                  end = begin + span.block < span.n ? begin + span.block : span.n;
    const float* u = tile;
    for (int64_t start = begin; start < end; start += HELD) {
        const int64_t n = end - start < HELD ? end - start : HELD;
        u = source_of(tile, span, start, n, decode_row);
        add_lanes<RULE>(lanes, u, n);
    }
    const float scale = onebit_scale(total(lanes), end - begin, RULE);
    put_scale(span.payload, block, scale);
    for (int64_t start = begin; start < end; start += HELD) {
        const int64_t n = end - start < HELD ? end - start : HELD;
        if (end - begin > HELD) u = source_of(tile, span, start, n, decode_row);
        pack_signs(bits + start / 8, u, n);
        if (span.error && scale == scale) store_error(span.error + start, u, n, scale);
    }
    return scale != scale;
}

}  // namespace

bool onebit_encode_kernel(const CodecSpan& span, int64_t first, int64_t last) {
    uint8_t* const bits = span.payload + 4 * span.blocks();
    bool bad = false;
    for (int64_t block = first; block < last; ++block)
        bad |= span.rule == RMS ? encode_block<RMS>(span, block, bits)
                                : encode_block<L1>(span, block, bits);
    return bad;
}

void onebit_encode_scaled_kernel(const CodecSpan& span, int64_t begin, int64_t end, float scale) {
    alignas(64) float tile[HELD];
    for (int64_t start = begin; start < end; start += HELD) {
        const int64_t n = end - start < HELD ? end - start : HELD;
        const float* u = source_of(tile, span, start, n, decode_row);
        pack_signs(span.payload + start / 8, u, n);
        if (span.error) store_finite_error(span.error + start, u, n, scale);
    }
}

void onebit_sum_kernel(const CodecSpan& span, int64_t first, int64_t last) {
    sum_blocks(span, first, last, decode_row);
}

void onebit_sums_kernel(const void* x, int dtype, const float* error, int64_t n, double* sums) {
    alignas(64) float tile[HELD];
    CodecSpan span;
    span.x = x;
    span.dtype = dtype;
    span.error = const_cast<float*>(error);
    double magnitudes[LANES] = {}, squares[LANES] = {};
    int64_t bad = 0;
    for (int64_t start = 0; start < n; start += HELD) {
        const int64_t count = n - start < HELD ? n - start : HELD;
        const float* u = source_of(tile, span, start, count, decode_row);
        add_lanes<L1>(magnitudes, u, count);
        add_lanes<RMS>(squares, u, count);
        int32_t here = 0;
        for (int64_t i = 0; i < count; ++i) here += (bits_of(u[i]) & 0x7F800000u) == 0x7F800000u;
        bad += here;
    }
    sums[0] = total(magnitudes);
    sums[1] = total(squares);
    sums[2] = static_cast<double>(bad);
}

}  // namespace pyops::PYOPS_ISA
