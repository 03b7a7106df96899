// The kernels of the Philox streams: four consecutive elements per thread, one Philox for those
// that share a block.
//
// Compiled without contraction (-fmad=false): the bits are those of the CPU and of plain torch
// (pyops/ops/random.py).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "../math/gaussian.h"
#include "../math/philox.h"

namespace pyops::cuda {

constexpr int RANDOM_THREADS = 256;

// Element i of the tensor has the global index offset + (i / row) * row_stride + i % row.
struct StreamRange {
    int64_t offset, row, row_stride;
};

__device__ __forceinline__ uint32_t word_of(const PhiloxBlock& block, unsigned lane) {
    const uint32_t low = lane & 1 ? block.word[1] : block.word[0],
                   high = lane & 1 ? block.word[3] : block.word[2];
    return lane & 2 ? high : low;
}

// What becomes of a word. `at` is asked for elements in ascending order, with the block that the
// element's words are in.
struct Uniform {
    using type = float;
    __device__ __forceinline__ float at(const PhiloxBlock& block, unsigned lane, bool) {
        return uniform_of(word_of(block, lane));
    }
};

struct Normal {
    using type = float;
    float even = 0.0f, odd = 0.0f;
    __device__ __forceinline__ float at(const PhiloxBlock& block, unsigned lane, bool new_pair) {
        if (new_pair)
            normal_pair(word_of(block, lane & 2), word_of(block, (lane & 2) | 1), even, odd);
        return lane & 1 ? odd : even;
    }
};

struct DropoutMask {
    using type = uint8_t;
    float p;
    __device__ __forceinline__ uint8_t at(const PhiloxBlock& block, unsigned lane, bool) {
        return uniform_of(word_of(block, lane)) >= p;
    }
};

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T element[4];
};

template <typename Draw>
__global__ __launch_bounds__(RANDOM_THREADS) void random_kernel(typename Draw::type* out,
                                                                int64_t numel, Draw draw,
                                                                uint64_t key, StreamRange range) {
    using Out = Four<typename Draw::type>;
    const bool in_line = reinterpret_cast<uintptr_t>(out) % sizeof(Out) == 0;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * RANDOM_THREADS;
    for (int64_t four = static_cast<int64_t>(blockIdx.x) * RANDOM_THREADS + threadIdx.x;
         four * 4 < numel; four += threads) {
        const int64_t first = four * 4;
        const int count = numel - first < 4 ? static_cast<int>(numel - first) : 4;
        int64_t line = 0, along = first;
        // A 64-bit division costs more than the block's Philox: not for a tensor that is one row
        if (first >= range.row) {
            line = first / range.row;
            along = first % range.row;
        }
        uint64_t index = static_cast<uint64_t>(range.offset + line * range.row_stride + along);
        Out drawn;
        // Nearly always: the four share a block, whose words then need no look for their place.
        if (index % 4 == 0 && along + count <= range.row) {
            const PhiloxBlock block = philox4x32(key, index / 4);
#pragma unroll
            for (unsigned k = 0; k < 4; ++k) drawn.element[k] = draw.at(block, k, k % 2 == 0);
        } else {
            uint64_t last = 0;
            PhiloxBlock block;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                if (k == 0 || index / 4 != last / 4) block = philox4x32(key, index / 4);
                drawn.element[k] = draw.at(block, static_cast<unsigned>(index % 4),
                                           k == 0 || index / 2 != last / 2);
                last = index;
                if (++along == range.row) {
                    along = 0;
                    ++line;
                }
                index = static_cast<uint64_t>(range.offset + line * range.row_stride + along);
            }
        }
        if (in_line && count == 4) {
            *reinterpret_cast<Out*>(out + first) = drawn;
        } else {
#pragma unroll
            for (int k = 0; k < 4; ++k)
                if (k < count) out[first + k] = drawn.element[k];
        }
    }
}

}  // namespace pyops::cuda
