// How the kernels of the codecs walk: a warp takes a block, line by line, and a thread four
// elements of each line.
//
//   block  |------ line 0 ------|------ line 1 ------|-- line 2 --| LINE = 128 elements
//   lanes  0000 1111 2222 ... 31   0000 1111 ...                one access of 16 bytes each
//                                                               (8 for 16-bit numbers)
//
// Every kernel is called with a source: what gives u, before the error, of four elements of a block
// (Numbers, or rows of payloads).
#pragma once

#include "../pack.cuh"
#include "reduce.cuh"

namespace pyops::cuda {

constexpr int CODEC_THREADS = 256;
constexpr int LINE = 4 * WARP;
constexpr int MAX_PAYLOADS = 256;  // pointers that travel as kernel arguments

struct Codec {
    int64_t n, block;
    float* error;      // null: none
    uint8_t* payload;  // [fp32 scales][bits or codes], at any address; or bits alone
    float* flag;
    int rule;
    bool stochastic_rounding;
    uint64_t seed, offset;
    int64_t first = 0;  // block of a launch
};

struct Payloads {
    const uint8_t* row[MAX_PAYLOADS];
    int count;
    int64_t head;             // bytes of scales before the bits or codes
    const float* row_scales;  // null: each block has its own
    float scale;              // of the sum
};

__host__ __device__ __forceinline__ bool in_line(const void* address, int bytes) {
    return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

__device__ __forceinline__ float scale_at(const uint8_t* payload, int64_t block) {
    const uint8_t* from = payload + 4 * block;
    if (in_line(from, 4)) return *reinterpret_cast<const float*>(from);
    return float_of(from[0] | static_cast<uint32_t>(from[1]) << 8 |
                    static_cast<uint32_t>(from[2]) << 16 | static_cast<uint32_t>(from[3]) << 24);
}

__device__ __forceinline__ void put_scale(uint8_t* payload, int64_t block, float scale) {
    uint8_t* to = payload + 4 * block;
    const uint32_t bits = bits_of(scale);
#pragma unroll
    for (int k = 0; k < 4; ++k) to[k] = static_cast<uint8_t>(bits >> (8 * k));
}

// Says that a scale is no number. Warps may do so at once, which is a race by name: all write the
// same value.
__device__ __forceinline__ void raise_flag(float* flag) {
    if (flag) *flag = 1.0f;
}

// Elements i .. i + 3 of those before `end`; 0 beyond.
template <int DTYPE>
__device__ __forceinline__ void load_four(const void* base, int64_t i, int64_t end,
                                          float (&values)[4]) {
    if (i + 4 <= end && in_line(base, 4 * bytes_of(DTYPE))) {
        widen(load<DTYPE, 4>(base, i), values);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k)
            values[k] = i + k < end ? widen(load<DTYPE, 1>(base, i + k).element[0]) : 0.0f;
    }
}

template <int DTYPE>
__device__ __forceinline__ void store_four(void* base, int64_t i, int64_t end,
                                           const float (&values)[4]) {
    if (i + 4 <= end && in_line(base, 4 * bytes_of(DTYPE))) {
        Pack<DTYPE, 4> pack;
#pragma unroll
        for (int k = 0; k < 4; ++k) pack.element[k] = narrow<DTYPE>(values[k]);
        store<DTYPE, 4>(base, i, pack);
    } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (i + k < end)
                store<DTYPE, 1>(base, i + k, Pack<DTYPE, 1>{{narrow<DTYPE>(values[k])}});
        }
    }
}

// The elements of a tensor.
template <int DTYPE>
struct Numbers {
    static constexpr bool WHOLE = true;  // four elements may be one access
    const void* x;
    __device__ __forceinline__ bool whole() const { return in_line(x, 4 * bytes_of(DTYPE)); }
    __device__ __forceinline__ Pack<DTYPE, 4> pack(int64_t i) const { return load<DTYPE, 4>(x, i); }
    __device__ __forceinline__ void operator()(int64_t, int64_t i, int64_t end,
                                               float (&u)[4]) const {
        load_four<DTYPE>(x, i, end, u);
    }
};

// scale * ((row 0 + row 1) + ...). DECODE fetches a word of one row and makes four numbers of it;
// the words of AHEAD rows are asked for before the first is needed.
template <typename Decode>
struct RowSum {
    static constexpr bool WHOLE = false;
    static constexpr int AHEAD = 4;
    Payloads rows;
    __device__ __forceinline__ void operator()(int64_t block, int64_t i, int64_t end,
                                               float (&u)[4]) const {
        for (int first = 0; first < rows.count; first += AHEAD) {
            uint32_t word[AHEAD];
            float scale[AHEAD];
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                if (first + r >= rows.count) continue;
                const uint8_t* const row = rows.row[first + r];
                word[r] = Decode::fetch(row + rows.head, i, end);
                scale[r] = rows.row_scales ? rows.row_scales[first + r] : scale_at(row, block);
            }
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                if (first + r >= rows.count) continue;
                float values[4];
                Decode::four(word[r], scale[r], i, end, values);
#pragma unroll
                for (int k = 0; k < 4; ++k) u[k] = first + r == 0 ? values[k] : u[k] + values[k];
            }
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) u[k] *= rows.scale;
    }

    // Whether a lane's elements of a line are whole words of every row.
    __device__ __forceinline__ bool whole() const {
        bool all = true;
        for (int r = 0; all && r < rows.count; ++r)
            all = in_line(rows.row[r] + rows.head, Decode::BYTES);
        return all;
    }

    // The same of GROUP lines that are there, the first of which is at `i`.
    template <int GROUP>
    __device__ __forceinline__ void several(int64_t block, int64_t i, float (&u)[GROUP][4]) const {
        for (int first = 0; first < rows.count; first += AHEAD) {
            uint32_t word[AHEAD][GROUP];
            float scale[AHEAD];
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                if (r > 0 && first + r >= rows.count) continue;
                const uint8_t* const row = rows.row[first + r];
#pragma unroll
                for (int k = 0; k < GROUP; ++k)
                    word[r][k] = Decode::fetch_whole(row + rows.head, i + k * LINE);
                scale[r] = rows.row_scales ? rows.row_scales[first + r] : scale_at(row, block);
            }
#pragma unroll
            for (int r = 0; r < AHEAD; ++r) {
                if (r > 0 && first + r >= rows.count) continue;
#pragma unroll
                for (int k = 0; k < GROUP; ++k) {
                    float values[4];
                    const int64_t at = i + k * LINE;
                    Decode::four(word[r][k], scale[r], at, at + 4, values);
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        u[k][j] = first + r == 0 ? values[j] : u[k][j] + values[j];
                }
            }
        }
#pragma unroll
        for (int k = 0; k < GROUP; ++k) {
#pragma unroll
            for (int j = 0; j < 4; ++j) u[k][j] *= rows.scale;
        }
    }
};

// u of four elements: the source, and the error where there is one.
template <typename Source>
__device__ __forceinline__ void four(const Codec& codec, const Source& source, int64_t block,
                                     int64_t i, int64_t end, float (&u)[4]) {
    source(block, i, end, u);
    if (codec.error == nullptr) return;
    float error[4];
    load_four<FP32>(codec.error, i, end, error);
#pragma unroll
    for (int k = 0; k < 4; ++k) u[k] += error[k];
}

// Calls body(block, first element, end) for the blocks of this warp, of all from `first` on. ALIKE:
// the compiler sees that blocks are alike in all lanes, so that branches on them are of the whole
// warp and their numbers are kept once. Not where one register more would be spilled.
template <bool ALIKE = true, typename Body>
__device__ __forceinline__ void for_blocks(int64_t n, int64_t block, int64_t first,
                                           const Body& body) {
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (CODEC_THREADS / WARP);
    const int64_t blocks = (n + block - 1) / block;
    int warp = threadIdx.x / WARP;
    if constexpr (ALIKE) warp = __shfl_sync(0xffffffffu, warp, 0);
    for (int64_t b = first + static_cast<int64_t>(blockIdx.x) * (CODEC_THREADS / WARP) + warp;
         b < blocks; b += warps) {
        const int64_t begin = b * block;
        body(b, begin, begin + block < n ? begin + block : n);
    }
}

// u of GROUP whole lines of rows, the first of which is at `i`: their error and their words are
// asked for before any of them is needed.
template <int GROUP, typename Decode>
__device__ __forceinline__ void take(const Codec& codec, const RowSum<Decode>& source,
                                     int64_t block, int64_t i, float (&u)[GROUP][4]) {
    Pack<FP32, 4> error[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; ++k)
        if (codec.error) error[k] = load<FP32, 4>(codec.error, i + k * LINE);
    source.template several<GROUP>(block, i, u);
#pragma unroll
    for (int k = 0; k < GROUP; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (codec.error) u[k][j] += error[k].element[j];
    }
}

// u of a block's lines. Of a full block whose accesses are whole, four lines of the source and of
// the error are asked for before any of them is needed: a check between two loads would have the
// second wait for the first.
template <int LINES, typename Source>
__device__ __forceinline__ void hold(const Codec& codec, const Source& source, int64_t block,
                                     int64_t begin, int64_t end, float (&held)[LINES][4]) {
    const int64_t mine = begin + 4 * (threadIdx.x % WARP);
    if constexpr (Source::WHOLE) {
        if (end - begin == LINES * LINE && source.whole() && in_line(codec.error, 16)) {
            constexpr int AHEAD = LINES < 4 ? LINES : 4;
#pragma unroll
            for (int first = 0; first < LINES; first += AHEAD) {
                decltype(source.pack(0)) raw[AHEAD];
                Pack<FP32, 4> error[AHEAD];
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) {
                    raw[k] = source.pack(mine + (first + k) * LINE);
                }
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) {
                    if (codec.error)
                        error[k] = load<FP32, 4>(codec.error, mine + (first + k) * LINE);
                }
#pragma unroll
                for (int k = 0; k < AHEAD; ++k) {
                    widen(raw[k], held[first + k]);
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (codec.error) held[first + k][j] += error[k].element[j];
                    }
                }
            }
            return;
        }
    } else {
        if (end - begin == LINES * LINE && source.whole() && in_line(codec.error, 16))
            return take<LINES>(codec, source, block, mine, held);
    }
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
        if (begin + line * LINE < end)
            four(codec, source, block, mine + line * LINE, end, held[line]);
    }
}

// Calls body(i, u) for the lines of one block; of rows, four lines are asked for at a time.
template <typename Source, typename Body>
__device__ __forceinline__ void look(const Codec& codec, const Source& source, int64_t block,
                                     int64_t begin, int64_t end, const Body& body) {
    constexpr int GROUP = 4;
    int64_t line = begin;
    const int64_t mine = 4 * (threadIdx.x % WARP);
    if constexpr (!Source::WHOLE) {
        if (source.whole() && in_line(codec.error, 16)) {
            for (; line + GROUP * LINE <= end; line += GROUP * LINE) {
                float u[GROUP][4];
                take<GROUP>(codec, source, block, mine + line, u);
#pragma unroll
                for (int k = 0; k < GROUP; ++k) body(mine + line + k * LINE, u[k]);
            }
        }
    }
    for (; line < end; line += LINE) {
        float u[4];
        four(codec, source, block, mine + line, end, u);
        body(mine + line, u);
    }
}

// The lines of one block, up to LINES of them held in registers between the two looks: first(u) and
// second(i, u), called by all lanes alike (an element at or beyond `end` is 0). `between` runs once
// in the middle.
template <int LINES, typename Source, typename First, typename Between, typename Second>
__device__ __forceinline__ void look_twice(const Codec& codec, const Source& source, int64_t block,
                                           int64_t begin, int64_t end, const First& first,
                                           const Between& between, const Second& second) {
    const int64_t mine = begin + 4 * (threadIdx.x % WARP);
    if constexpr (LINES > 0) {
        float held[LINES][4];
        hold<LINES>(codec, source, block, begin, end, held);
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            if (begin + line * LINE < end) first(held[line]);
        }
        between();
#pragma unroll
        for (int line = 0; line < LINES; ++line) {
            if (begin + line * LINE < end) second(mine + line * LINE, held[line]);
        }
    } else {
        look(codec, source, block, begin, end, [&](int64_t, const float (&u)[4]) { first(u); });
        between();
        look(codec, source, block, begin, end, second);
    }
}

// out (+)= the source.
template <int OUT, typename Source>
__global__ __launch_bounds__(CODEC_THREADS) void decode_kernel(
    void* out, const __grid_constant__ Source source, int64_t n, int64_t block, bool accumulate) {
    for_blocks(n, block, 0, [&](int64_t b, int64_t begin, int64_t end) {
        for (int64_t i = begin + 4 * (threadIdx.x % WARP); i < end; i += LINE) {
            float values[4], before[4];
            source(b, i, end, values);
            if (accumulate) {
                load_four<OUT>(out, i, end, before);
#pragma unroll
                for (int k = 0; k < 4; ++k) values[k] = before[k] + values[k];
            }
            store_four<OUT>(out, i, end, values);
        }
    });
}

}  // namespace pyops::cuda
