// The kernels of one-bit compression. A block's sum is in the order of math/communication/onebit.h:
// sum number 4 * lane + k is thread `lane`'s.
//
// Bytes per element of fp32 with error: 12.1 in one pass; blocks of more than HELD_LINES lines are
// read twice, from L2. So are those of rows that aren't full, or whose words are out of line.
#pragma once

#include "../../math/communication/onebit.h"
#include "codec.cuh"

namespace pyops::cuda {

constexpr int HELD_LINES = 16;     // 2048 elements: 64 registers a thread
constexpr int ONEBIT_CTAS = 1024;  // of onebit_norm, on every device
// All of them at a time on the 132 multiprocessors of an H100 or H200: what is left for later keeps
// too few bytes on their way. sm_80 would spill, and the 108 of an A100 have no room for all.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int ONEBIT_RESIDENT = 6;
#else
constexpr int ONEBIT_RESIDENT = 8;
#endif

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

// The byte of two lanes, which the even one may store. Bits at or beyond `end` are 0.
template <typename Index>
__device__ __forceinline__ unsigned signs_of(Index i, Index end, const float (&u)[4]) {
    unsigned nibble = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) nibble |= static_cast<unsigned>(i + k < end && u[k] >= 0.0f) << k;
    return nibble | __shfl_xor_sync(0xffffffffu, nibble, 1) << 4;
}

__device__ __forceinline__ void put_signs(uint8_t* bits, int64_t i, int64_t end,
                                          const float (&u)[4]) {
    const unsigned byte = signs_of(i, end, u);
    if (i % 8 == 0 && i < end) bits[i / 8] = static_cast<uint8_t>(byte);
}

__device__ __forceinline__ double total_of(double (&sum)[4]) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], other);
    }
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// The signs of ROWS rows' blocks in whole words, two a lane, all asked for at once:
//
//   word w of a block      lane w % 32's, its number w / 32
//   lane k's of line l     nibble k % 8 of word 4 l + k / 8, for which it asks that lane
//
// A row that is not there adds -0 to every element, which changes none.
struct BlockWords {
    static constexpr int ROWS = 4, WORDS = HELD_LINES * LINE / (32 * WARP);
    uint32_t word[ROWS][WORDS];
    uint32_t scale[ROWS];  // the bits of it

    __device__ __forceinline__ BlockWords(const Payloads& rows, int first, int64_t block,
                                          int64_t begin) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            uint32_t alike = 0x80000000u;
#pragma unroll
            for (int k = 0; k < WORDS; ++k) word[r][k] = ~0u;
            if (first + r < rows.count) {
                const uint8_t* const row = rows.row[first + r];
                const auto* const words =
                    reinterpret_cast<const uint32_t*>(row + rows.head + begin / 8);
#pragma unroll
                for (int k = 0; k < WORDS; ++k) word[r][k] = words[threadIdx.x % WARP + k * WARP];
                // In line, as the words are.
                alike = reinterpret_cast<const uint32_t*>(row)[block];
            }
            // From a lane to itself, so that the compiler does not know it to be alike in all of
            // them: it would move it to a register for each operation.
            scale[r] = __shfl_sync(0xffffffffu, alike, static_cast<int>(threadIdx.x % WARP));
        }
    }

    // sum = row 0 + ..., or (sum + row 0) + ... unless this is the START, of this lane's elements
    // of a line.
    template <bool START>
    __device__ __forceinline__ void add(int line, float (&sum)[4]) const {
        const int lane = threadIdx.x % WARP;
        const int from = line * LINE / 32 + lane / 8, top = 28 - 4 * (lane % 8);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const uint32_t mine = word[r][line * LINE / (32 * WARP)];
            const uint32_t nibble = __shfl_sync(0xffffffffu, mine, from % WARP) << top;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                // onebit_value: the scale's sign is turned where the bit, brought to the top, is 0.
                const float value = float_of((~(nibble << (3 - j)) & 0x80000000u) ^ scale[r]);
                sum[j] = START && r == 0 ? value : sum[j] + value;
            }
        }
    }
};

// u of such a block; `error`: this lane's first, or null. The whole error is on its way to L2 while
// the rows are added up: in registers there is room for the sums alone.
__device__ __forceinline__ void hold_words(const Payloads& rows, const float* error, int64_t block,
                                           int64_t begin, float (&held)[HELD_LINES][4]) {
    constexpr int ROWS = BlockWords::ROWS, AHEAD = 4;
#pragma unroll
    for (int line = 0; line < HELD_LINES; ++line)
        if (error) prefetch(error + line * LINE);
    const BlockWords start(rows, 0, block, begin);
#pragma unroll
    for (int line = 0; line < HELD_LINES; ++line) start.add<true>(line, held[line]);
    for (int first = ROWS; first < rows.count; first += ROWS) {
        const BlockWords words(rows, first, block, begin);
#pragma unroll
        for (int line = 0; line < HELD_LINES; ++line) words.add<false>(line, held[line]);
    }
#pragma unroll
    for (int line = 0; line < HELD_LINES; line += AHEAD) {
        Pack<FP32, 4> before[AHEAD] = {};  // where there is none, 0: of which nothing tells -0
        __syncwarp();  // else the compiler would ask for more of them, and spill sums
#pragma unroll
        for (int k = 0; k < AHEAD; ++k)
            if (error) before[k] = load<FP32, 4>(error, (line + k) * LINE);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
                held[line + k][j] = held[line + k][j] * rows.scale + before[k].element[j];
        }
    }
}

// A block on its way to its scale, its signs and its errors.
struct OneBitBlock {
    const Codec& codec;
    int64_t number, count;
    double sum[4] = {0.0, 0.0, 0.0, 0.0};
    float scale = 0.0f;

    __device__ __forceinline__ void add(const float (&u)[4], int rule) {
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[k] += onebit_term(u[k], rule);
    }
    __device__ __forceinline__ void settle() {
        scale = onebit_scale(total_of(sum), count, codec.rule);
        if (threadIdx.x % WARP == 0) {
            put_scale(codec.payload, number, scale);
            if (scale != scale) raise_flag(codec.flag);
        }
    }
    // Whether they are to be stored.
    __device__ __forceinline__ bool errors(const float (&u)[4], float (&error)[4]) const {
#pragma unroll
        for (int k = 0; k < 4; ++k) error[k] = onebit_error(u[k], scale);
        return codec.error != nullptr && scale == scale;
    }
};

__device__ __forceinline__ uint8_t* bits_behind_scales(const Codec& codec) {
    return codec.payload + 4 * ((codec.n + codec.block - 1) / codec.block);
}

// Room for two CTAs where a block is held: 128 registers.
template <int LINES, typename Source>
__global__ __launch_bounds__(CODEC_THREADS, (LINES > 0 ? 2 : 0)) void onebit_encode_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source) {
    uint8_t* const bits = bits_behind_scales(codec);
    constexpr bool ALIKE = LINES == 0;
    for_blocks<ALIKE>(
        codec.n, codec.block, codec.first, [&](int64_t b, int64_t begin, int64_t end) {
            OneBitBlock block{codec, b, end - begin};
            look_twice<LINES>(
                codec, source, b, begin, end,
                [&](const float (&u)[4]) { block.add(u, codec.rule); }, [&] { block.settle(); },
                [&](int64_t i, const float (&u)[4]) {
                    put_signs(bits, i, end, u);
                    float error[4];
                    if (block.errors(u, error)) store_four<FP32>(codec.error, i, end, error);
                });
        });
}

// How many blocks onebit_held_kernel takes: the full ones, where all accesses are whole.
inline int64_t held_blocks(const Codec& codec, const Payloads& rows) {
    constexpr int64_t COUNT = HELD_LINES * LINE;
    bool all = codec.block == COUNT && !rows.row_scales && in_line(codec.error, 16);
    for (int r = 0; all && r < rows.count; ++r) all = in_line(rows.row[r] + rows.head, 4);
    return all ? codec.n / COUNT : 0;
}

// The same of `blocks` full blocks of rows. A kernel of its own: what other blocks need would take
// registers, or spill them.
__global__ __launch_bounds__(CODEC_THREADS,
                             2) void onebit_held_kernel(const __grid_constant__ Codec codec,
                                                        const __grid_constant__ Payloads rows,
                                                        int64_t blocks) {
    constexpr int64_t COUNT = HELD_LINES * LINE;
    uint8_t* const bits = bits_behind_scales(codec);
    for_blocks(blocks * COUNT, COUNT, 0, [&](int64_t b, int64_t begin, int64_t) {
        OneBitBlock block{codec, b, COUNT};
        float held[HELD_LINES][4];
        const int lane = threadIdx.x % WARP;
        float* const error = codec.error ? codec.error + begin + 4 * lane : nullptr;
        hold_words(rows, error, b, begin, held);
        const auto add = [&](int rule) {
#pragma unroll
            for (int line = 0; line < HELD_LINES; ++line) block.add(held[line], rule);
        };
        if (codec.rule == RMS)
            add(RMS);
        else
            add(L1);
        block.settle();
        uint8_t* const signs = bits + begin / 8 + lane / 2;
#pragma unroll
        for (int line = 0; line < HELD_LINES; ++line) {
            const unsigned byte = signs_of(lane, LINE, held[line]);
            if (lane % 2 == 0) signs[line * LINE / 8] = static_cast<uint8_t>(byte);
            Pack<FP32, 4> left;
            if (block.errors(held[line], left.element)) store<FP32, 4>(error, line * LINE, left);
        }
    });
}

// With the scale given; `codec.payload` is bits alone, `codec.block` any multiple of LINE.
template <typename Source>
__global__ __launch_bounds__(CODEC_THREADS) void onebit_scaled_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source,
    const float* scale) {
    const float given = *scale;
    for_blocks(codec.n, codec.block, 0, [&](int64_t b, int64_t begin, int64_t end) {
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
__global__ __launch_bounds__(CODEC_THREADS, ONEBIT_RESIDENT) void onebit_norm_kernel(
    const __grid_constant__ Codec codec, const __grid_constant__ Source source,
    OneBitWorkspace* workspace, double* out) {
    double sum[3] = {0.0, 0.0, 0.0};
    int non_finite = 0;
    for_blocks(codec.n, codec.block, 0, [&](int64_t b, int64_t begin, int64_t end) {
        for (int64_t i = begin + 4 * (threadIdx.x % WARP); i < end; i += LINE) {
            float u[4];
            four(codec, source, b, i, end, u);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                sum[0] += onebit_term(u[k], L1);
                sum[1] += onebit_term(u[k], RMS);
                non_finite += (bits_of(u[k]) & 0x7F800000u) == 0x7F800000u;
            }
        }
    });
    sum[2] = non_finite;
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
