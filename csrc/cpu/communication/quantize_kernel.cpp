// Eight bits per number: int8 and fp8. A block is read once; its largest magnitude gives the scale,
// and only its error is written back.
#include "../../math/communication/quantize.h"
#include "codec_tile.h"
#include "../codes/coded_row.h"
#include "../rows/philox_fill.h"

namespace pyops::PYOPS_ISA {
namespace {

template <int FORMAT>
void to_codes_randomly(uint8_t* __restrict codes, const float* __restrict u, int64_t n, float scale,
                       const uint16_t* __restrict random) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i)
        codes[i] = quantize_code<FORMAT>(quantize_ratio<FORMAT>(u[i], scale),
                                         static_cast<uint32_t>(random[i]));
}

template <int FORMAT, bool ADD>
void from_codes(float* __restrict out, const uint8_t* __restrict codes, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const float value = scale * quantize_number<FORMAT>(codes[i]);
        out[i] = ADD ? out[i] + value : value;
    }
}

template <int FORMAT>
void store_error(float* __restrict error, const float* __restrict u,
                 const uint8_t* __restrict codes, int64_t n, float scale) {
    PYOPS_VECTORISE
    for (int64_t i = 0; i < n; ++i) {
        const float value = scale * quantize_number<FORMAT>(codes[i]);
        error[i] = u[i] - value;
    }
}

template <int FORMAT>
void decode_row(float* out, const CodecSpan& span, int row, int64_t begin, int64_t n, bool add) {
    const uint8_t* codes = span.rows[row] + 4 * span.blocks() + begin;
    const float scale = scale_at(span.rows[row], begin / span.block);
    if (add)
        from_codes<FORMAT, true>(out, codes, n, scale);
    else
        from_codes<FORMAT, false>(out, codes, n, scale);
}

template <int FORMAT>
bool encode_block(const CodecSpan& span, int64_t block, uint8_t* codes) {
    alignas(64) float tile[HELD];
    const int64_t begin = block * span.block,
                  end = begin + span.block < span.n ? begin + span.block : span.n;
    const float* u = tile;
    uint32_t largest = 0;
    for (int64_t start = begin; start < end; start += HELD) {
        const int64_t n = end - start < HELD ? end - start : HELD;
        u = source_of(tile, span, start, n, decode_row<FORMAT>);
        largest = largest_of(u, n, largest);
    }
    const float scale = quantize_scale<FORMAT>(largest);
    put_scale(span.payload, block, scale);
    for (int64_t start = begin; start < end; start += HELD) {
        const int64_t n = end - start < HELD ? end - start : HELD;
        if (end - begin > HELD) u = source_of(tile, span, start, n, decode_row<FORMAT>);
        if (span.stochastic_rounding) {
            uint16_t random[HELD];
            random_halves(random, n, span.seed, span.offset + static_cast<uint64_t>(start), 0, 0);
            to_codes_randomly<FORMAT>(codes + start, u, n, scale, random);
        } else {
            to_codes<FORMAT>(codes + start, u, n, scale);
        }
        if (span.error && scale == scale)
            store_error<FORMAT>(span.error + start, u, codes + start, n, scale);
    }
    return scale != scale;
}

template <int FORMAT>
bool encode_blocks(const CodecSpan& span, int64_t first, int64_t last) {
    uint8_t* const codes = span.payload + 4 * span.blocks();
    bool bad = false;
    for (int64_t block = first; block < last; ++block)
        bad |= encode_block<FORMAT>(span, block, codes);
    return bad;
}

}  // namespace

bool quantize_encode_kernel(const CodecSpan& span, int64_t first, int64_t last) {
    if (span.rule == INT8) return encode_blocks<INT8>(span, first, last);
    return span.rule == E4M3 ? encode_blocks<E4M3>(span, first, last)
                             : encode_blocks<E5M2>(span, first, last);
}

void quantize_sum_kernel(const CodecSpan& span, int64_t first, int64_t last) {
    if (span.rule == INT8)
        sum_blocks(span, first, last, decode_row<INT8>);
    else if (span.rule == E4M3)
        sum_blocks(span, first, last, decode_row<E4M3>);
    else
        sum_blocks(span, first, last, decode_row<E5M2>);
}

}  // namespace pyops::PYOPS_ISA
