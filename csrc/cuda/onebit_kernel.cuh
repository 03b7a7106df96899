// The kernels of one-bit compression. A block's sum is in the order of math/onebit.h: sum number 4
// * lane + k is thread `lane`'s.
//
// Bytes per element of fp32 with error: 12.1 in one pass; blocks of more than HELD_LINES lines are
// read twice, from L2.
#pragma once

#include "../math/onebit.h"
#include "codec.cuh"

namespace pyops::cuda {

constexpr int HELD_LINES = 16;     // 2048 elements: 64 registers a thread
constexpr int ONEBIT_CTAS = 1024;  // of onebit_norm, on every device

struct SignBits {
    static constexpr int BYTES = 1;  // of a word
    __device__ static __forceinline__ uint32_t fetch_whole(const uint8_t* bits, int64_t i) {
        return bits[i / 8];
    }
    __device__ static __forceinline__ uint32_t fetch(const uint8_t* bits, int64_t i, int64_t end) {
        return i < end ? bits[i / 8] : 0u;
    }
    __device__ static __forceinline__ void four(uint32_t byte, float scale, int64_t i, int64_t end,
                                                float (&values)[4]) {
        const uint32_t nibble = byte >> (i % 8);
#pragma unroll
        for (int k = 0; k < 4; ++k)
            values[k] = i + k < end ? onebit_value(scale, (nibble >> k) & 1) : 0.0f;
    }
};

// Two lanes make a byte. Bits at or beyond `end` are 0.
__device__ __forceinline__ void put_signs(uint8_t* bits, int64_t i, int64_t end,
                                          const float (&u)[4]) {
    unsigned nibble = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) nibble |= static_cast<unsigned>(i + k < end && u[k] >= 0.0f) << k;
    const unsigned other = __shfl_xor_sync(0xffffffffu, nibble, 1);
    if (i % 8 == 0 && i < end) bits[i / 8] = static_cast<uint8_t>(nibble | other << 4);
}

__device__ __forceinline__ double total_of(double (&sum)[4]) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], other);
    }
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

template <int LINES, typename Source>
__global__ __launch_bounds__(CODEC_THREADS) void onebit_encode_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source) {
    uint8_t* const bits = codec.payload + 4 * ((codec.n + codec.block - 1) / codec.block);
    for_blocks(codec.n, codec.block, [&](int64_t b, int64_t begin, int64_t end) {
        double sum[4] = {0.0, 0.0, 0.0, 0.0};
        float scale = 0.0f;
        look_twice<LINES>(
            codec, source, b, begin, end,
            [&](const float (&u)[4]) {
#pragma unroll
                for (int k = 0; k < 4; ++k) sum[k] += onebit_term(u[k], codec.rule);
            },
            [&] {
                scale = onebit_scale(total_of(sum), end - begin, codec.rule);
                if (threadIdx.x % WARP == 0) {
                    put_scale(codec.payload, b, scale);
                    if (scale != scale) raise_flag(codec.flag);
                }
            },
            [&](int64_t i, const float (&u)[4]) {
                put_signs(bits, i, end, u);
                if (codec.error == nullptr || scale != scale) return;
                float error[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) error[k] = onebit_error(u[k], scale);
                store_four<FP32>(codec.error, i, end, error);
            });
    });
}

// With the scale given; `codec.payload` is bits alone, `codec.block` any multiple of LINE.
template <typename Source>
__global__ __launch_bounds__(CODEC_THREADS) void onebit_scaled_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source,
    const float* scale) {
    const float given = *scale;
    for_blocks(codec.n, codec.block, [&](int64_t b, int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; line += LINE) {
            const int64_t i = line + 4 * (threadIdx.x % WARP);
            float u[4], error[4];
            source(b, i, end, u);
            if (codec.error) {
                load_four<FP32>(codec.error, i, end, error);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    u[k] += error[k];
                    const float e = onebit_error(u[k], given);
                    error[k] = (bits_of(e) & 0x7F800000u) == 0x7F800000u ? error[k] : e;
                }
                store_four<FP32>(codec.error, i, end, error);
            }
            put_signs(codec.payload, i, end, u);
        }
    });
}

struct OneBitWorkspace {
    double partial[ONEBIT_CTAS][3];
    unsigned ticket;
};

// out = {sum |u|, sum u^2, non-finite}, in an order that is the same on every device and in every
// run.
template <typename Source>
__global__ __launch_bounds__(CODEC_THREADS) void onebit_norm_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source,
    OneBitWorkspace* workspace, double* out) {
    double sum[3] = {0.0, 0.0, 0.0};
    for_blocks(codec.n, codec.block, [&](int64_t b, int64_t begin, int64_t end) {
        for (int64_t i = begin + 4 * (threadIdx.x % WARP); i < end; i += LINE) {
            float u[4];
            four(codec, source, b, i, end, u);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sum[0] += onebit_term(u[k], L1);
                sum[1] += onebit_term(u[k], RMS);
                sum[2] += (bits_of(u[k]) & 0x7F800000u) == 0x7F800000u ? 1.0 : 0.0;
            }
        }
    });
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        const double here = block_sum<CODEC_THREADS>(sum[k]);
        if (threadIdx.x == 0) workspace->partial[blockIdx.x][k] = here;
    }
    if (!last_cta(&workspace->ticket)) return;
#pragma unroll
    for (int k = 0; k < 3; ++k) {
        double mine = 0.0;
        for (int cta = threadIdx.x; cta < static_cast<int>(gridDim.x); cta += CODEC_THREADS)
            mine += __ldcg(&workspace->partial[cta][k]);
        const double all = block_sum<CODEC_THREADS>(mine);
        if (threadIdx.x == 0) out[k] = all;
    }
}

}  // namespace pyops::cuda
