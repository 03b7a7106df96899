// The CUDA kernels of the codecs as functions of the host, for tests/cuda/test_codecs.py: no GPU
// and no nvcc needed.
#include <cuda_runtime.h>

#include "../../../csrc/cuda/communication/onebit_kernel.cuh"
#include "../../../csrc/cuda/communication/quantize_kernel.cuh"
#include "encode.h"

using namespace pyops;
using namespace pyops::cuda;

namespace {

Payloads payloads(const void* const* rows, int count, int64_t head, const float* scales,
                  float scale) {
    Payloads out{};
    for (int r = 0; r < count; ++r) out.row[r] = static_cast<const uint8_t*>(rows[r]);
    out.count = count;
    out.head = head;
    out.row_scales = scales;
    out.scale = scale;
    return out;
}

template <typename Body>
void with_format(int format, const Body& body) {
    if (format == INT8)
        body(Code<INT8>{});
    else if (format == E4M3)
        body(Code<E4M3>{});
    else
        body(Code<E5M2>{});
}

template <typename Source>
void decode(unsigned grid, void* out, int dtype, const Source& source, int64_t n, int64_t block,
            int accumulate) {
    with_dtype(dtype, [&](auto to) {
        emulation::launch(grid, CODEC_THREADS, [&] {
            decode_kernel<decltype(to)::value>(out, source, n, block, accumulate != 0);
        });
    });
}

}  // namespace

extern "C" {

static Codec codec_of(const Encode& e) {
    return {e.n,
            e.block,
            e.error,
            e.payload,
            e.flag,
            static_cast<int>(e.rule),
            e.stochastic != 0,
            static_cast<uint64_t>(e.seed),
            static_cast<uint64_t>(e.offset),
            0};
}

void emulated_onebit_encode(unsigned grid, const Encode* e, int64_t head) {
    Codec codec = codec_of(*e);
    const auto run = [&](const auto& source) {
        emulation::launch(grid, CODEC_THREADS, [&] {
            if constexpr (std::decay_t<decltype(source)>::WHOLE) {
                if (e->block <= HELD_LINES * LINE)
                    return onebit_encode_kernel<HELD_LINES>(codec, source);
            }
            onebit_encode_kernel<0>(codec, source);
        });
    };
    if (!e->x) {
        const RowSum<SignBits> source{
            payloads(e->rows, static_cast<int>(e->count), head, nullptr, e->scale)};
        codec.first = held_blocks(codec, source.rows);
        if (codec.first > 0)
            emulation::launch(grid, CODEC_THREADS,
                              [&] { onebit_held_kernel(codec, source.rows, codec.first); });
        if (codec.first * codec.block < codec.n) run(source);
        return;
    }
    with_dtype(static_cast<int>(e->dtype),
               [&](auto code) { run(Numbers<decltype(code)::value>{e->x}); });
}

// out[i] = numbers[i] / scale as the eight-bit codecs divide; false where they don't do so by the
// reciprocal.
int emulated_quotients(float* out, const float* numbers, float scale, int64_t n) {
    const Reciprocal reciprocal(scale);
    for (int64_t i = 0; i < n; ++i) out[i] = reciprocal.times(numbers[i]);
    return reciprocal.exact;
}

// How many quotients of numbers with mantissas of 24 bits are wrong, of all that lie k / (2 b) last
// places from the middle between two numbers, for all b and k = 1, 2, 3; `cases` is how many there
// are. a 2^s = (b m + k) / 2 with m odd.
int64_t emulated_nearest_quotients(int64_t* cases) {
    int64_t wrong = 0;
    *cases = 0;
    for (uint64_t b = 1u << 23; b < 1u << 24; ++b) {
        const int even = b % 2 ? 0 : b % 4 ? 1 : 2;
        if (even > 1) continue;  // no m for so small a k
        const uint64_t odd = b >> even;
        uint64_t inverse = odd;
        for (int i = 0; i < 5; ++i) inverse *= 2 - odd * inverse;  // modulo 2^64
        const Reciprocal reciprocal(static_cast<float>(b));
        for (const int s : {24, 25})
            for (const int64_t k : {1, -1, 2, -2, 3, -3}) {
                if ((k % 2 == 0) != (even == 1)) continue;
                const uint64_t modulus = uint64_t{1} << (s - even);
                for (uint64_t m = static_cast<uint64_t>(-(k >> even)) * inverse & (modulus - 1);
                     m < 1u << 25; m += modulus) {
                    const uint64_t a = (b * m + static_cast<uint64_t>(k)) >> s;
                    if (m < 1u << 24 || m % 2 == 0 || a >= 1u << 24 || a < 1u << 23) continue;
                    const float of = static_cast<float>(a);
                    wrong += reciprocal.times(of) != of / static_cast<float>(b);
                    ++*cases;
                }
            }
    }
    return wrong;
}

void emulated_onebit_scaled(unsigned grid, const Encode* e, const float* scale) {
    const Codec codec = codec_of(*e);
    with_dtype(static_cast<int>(e->dtype), [&](auto code) {
        const Numbers<decltype(code)::value> source{e->x};
        emulation::launch(grid, CODEC_THREADS, [&] { onebit_scaled_kernel(codec, source, scale); });
    });
}

void emulated_onebit_norm(unsigned grid, const Encode* e, double* out) {
    static OneBitWorkspace workspace;
    const Codec codec = codec_of(*e);
    with_dtype(static_cast<int>(e->dtype), [&](auto code) {
        const Numbers<decltype(code)::value> source{e->x};
        emulation::launch(grid, CODEC_THREADS,
                          [&] { onebit_norm_kernel(codec, source, &workspace, out); });
    });
}

void emulated_onebit_decode(unsigned grid, void* out, int dtype, const void* const* rows, int count,
                            int64_t head, const float* scales, float scale, int64_t n,
                            int64_t block, int accumulate) {
    decode(grid, out, dtype, RowSum<SignBits>{payloads(rows, count, head, scales, scale)}, n, block,
           accumulate);
}

void emulated_quantize_encode(unsigned grid, const Encode* e, int64_t head) {
    const Codec codec = codec_of(*e);
    with_format(codec.rule, [&](auto format) {
        constexpr int FORMAT = decltype(format)::value;
        const auto run = [&](const auto& source) {
            emulation::launch(grid, CODEC_THREADS, [&] {
                if (e->block <= QUANTIZE_LINES * LINE)
                    quantize_encode_kernel<FORMAT, QUANTIZE_LINES>(codec, source);
                else
                    quantize_encode_kernel<FORMAT, 0>(codec, source);
            });
        };
        if (!e->x)
            return run(RowSum<Codes<FORMAT>>{
                payloads(e->rows, static_cast<int>(e->count), head, nullptr, e->scale)});
        with_dtype(static_cast<int>(e->dtype),
                   [&](auto code) { run(Numbers<decltype(code)::value>{e->x}); });
    });
}

void emulated_quantize_decode(unsigned grid, void* out, int dtype, const void* const* rows,
                              int count, int64_t head, float scale, int64_t n, int64_t block,
                              int format, int accumulate) {
    with_format(format, [&](auto code) {
        decode(grid, out, dtype,
               RowSum<Codes<decltype(code)::value>>{payloads(rows, count, head, nullptr, scale)}, n,
               block, accumulate);
    });
}

}  // extern "C"
