// The kernels of eight-bit compression: a warp holds a block of up to QUANTIZE_LINES lines between
// its largest magnitude and its codes.
//
// Bytes per element of fp32: 5 without error, 13 with it; larger blocks are read twice, from L2.
#pragma once

#include "../../math/philox.h"
#include "../../math/communication/quantize.h"
#include "codec.cuh"

namespace pyops::cuda {

constexpr int QUANTIZE_LINES = 2;  // 256 elements

template <int FORMAT>
struct Codes {
    static constexpr int BYTES = 4;  // of a word
    __device__ static __forceinline__ uint32_t fetch_whole(const uint8_t* codes, int64_t i) {
        return *reinterpret_cast<const uint32_t*>(codes + i);
    }
    __device__ static __forceinline__ uint32_t fetch(const uint8_t* codes, int64_t i, int64_t end) {
        if (i + 4 <= end && in_line(codes, 4)) return *reinterpret_cast<const uint32_t*>(codes + i);
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            word |= i + k < end ? static_cast<uint32_t>(codes[i + k]) << (8 * k) : 0u;
        return word;
    }
    __device__ static __forceinline__ void four(uint32_t word, float scale, int64_t, int64_t,
                                                float (&values)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            values[k] = scale * quantize_number<FORMAT>(static_cast<uint8_t>(word >> (8 * k)));
    }
};

// u / scale for many u, with the bits of the division and without one: the reciprocal once for a
// block, then three operations for each.
//
//   q           u * reciprocal, within one and a half last places of the quotient
//   u - q scale exact, and times the reciprocal what is to be added to q (Markstein,
//               "Computation of elementary functions on the IBM RISC System/6000 processor", 1990)
//
// With b the scale's mantissa as an integer of 24 bits and B = b / 2^23, what is then wrong is
// below B (B / 2 + 1 / 2) 2^-25 of a last place, and no quotient is nearer to the middle between
// two numbers than k / (2 b), k = 1, 2, ...: too far for k > 2. Of k = 1 and 2 there are 17
// million, and a test goes through all of them.
//
// Exact where neither the reciprocal nor u - q scale leaves fp32's normal numbers: for other scales
// a block divides, and a u that small has the code of 0 and the error u either way.
struct Reciprocal {
    float scale, inverse;
    bool exact;

    __device__ __forceinline__ explicit Reciprocal(float of)
        : scale(of), inverse(1.0f / of), exact(of > 0x1p-60f && of < 0x1p60f) {}

    __device__ __forceinline__ float times(float u) const {
        const float q = u * inverse;
        return copysignf(fmaf(fmaf(-q, scale, u), inverse, q), u);  // the sign of -0, too
    }
};

// The half-words of elements index .. index + 3 of the stream.
__device__ __forceinline__ void random_halves(uint64_t key, uint64_t index, uint32_t (&half)[4]) {
    PhiloxBlock drawn = philox4x32(key, index / 8);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        const uint64_t j = index + k;
        if (k > 0 && j % 8 == 0) drawn = philox4x32(key, j / 8);
        const unsigned which = static_cast<unsigned>(j / 2 % 4);
        const uint32_t low = which & 1 ? drawn.word[1] : drawn.word[0],
                       high = which & 1 ? drawn.word[3] : drawn.word[2];
        half[k] = ((which & 2 ? high : low) >> (16 * (j % 2))) & 0xFFFFu;
    }
}

__device__ __forceinline__ void put_codes(uint8_t* codes, int64_t i, int64_t end,
                                          const uint8_t (&code)[4]) {
    if (i + 4 <= end && in_line(codes, 4)) {
        *reinterpret_cast<uint32_t*>(codes + i) = code[0] | static_cast<uint32_t>(code[1]) << 8 |
                                                  static_cast<uint32_t>(code[2]) << 16 |
                                                  static_cast<uint32_t>(code[3]) << 24;
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (i + k < end) codes[i + k] = code[k];
        }
    }
}

template <int FORMAT, int LINES, typename Source>
__global__ __launch_bounds__(CODEC_THREADS, (Source::WHOLE ? 3 : 2)) void quantize_encode_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source) {
    uint8_t* const codes = codec.payload + 4 * ((codec.n + codec.block - 1) / codec.block);
    for_blocks(codec.n, codec.block, 0, [&](int64_t b, int64_t begin, int64_t end) {
        uint32_t largest = 0;
        float scale = 0.0f;
        Reciprocal reciprocal(1.0f);
        look_twice<LINES>(
            codec, source, b, begin, end,
            [&](const float (&u)[4]) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint32_t magnitude = bits_of(u[k]) & 0x7FFFFFFFu;
                    largest = magnitude > largest ? magnitude : largest;
                }
            },
            [&] {
#pragma unroll
                for (int other = WARP / 2; other > 0; other /= 2) {
                    const uint32_t theirs = __shfl_xor_sync(0xffffffffu, largest, other);
                    largest = theirs > largest ? theirs : largest;
                }
                scale = quantize_scale<FORMAT>(largest);
                reciprocal = Reciprocal(scale);
                if (threadIdx.x % WARP == 0) {
                    put_scale(codec.payload, b, scale);
                    if (scale != scale) raise_flag(codec.flag);
                }
            },
            [&](int64_t i, const float (&u)[4]) {
                uint32_t half[4] = {0, 0, 0, 0};
                if (codec.stochastic_rounding)
                    random_halves(codec.seed, codec.offset + static_cast<uint64_t>(i), half);
                uint8_t code[4];
                float error[4], t[4];
                if (reciprocal.exact) {
#pragma unroll
                    for (int k = 0; k < 4; ++k)
                        t[k] = quantize_within<FORMAT>(reciprocal.times(u[k]));
                } else {
                    for (int k = 0; k < 4; ++k) t[k] = quantize_ratio<FORMAT>(u[k], scale);
                }
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    code[k] = codec.stochastic_rounding ? quantize_code<FORMAT>(t[k], half[k])
                                                        : quantize_code<FORMAT>(t[k]);
                    error[k] = u[k] - scale * quantize_number<FORMAT>(code[k]);
                }
                put_codes(codes, i, end, code);
                if (codec.error && scale == scale) store_four<FP32>(codec.error, i, end, error);
            });
    });
}

}  // namespace pyops::cuda
