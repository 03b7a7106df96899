// The table of rows in device memory, one per parameter, and the walk of a persistent grid over its
// chunks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../../math/optimizers/table.h"
#include "../partition.cuh"

namespace pyops::cuda {

constexpr int THREADS = 256;  // of every kernel that walks a table

// Columns are read once per row by all lanes alike.
__device__ __forceinline__ int64_t column(const int64_t* table, int row, int which) {
    return table[static_cast<int64_t>(row) * COLUMNS + which];
}

template <typename T>
__device__ __forceinline__ T* pointer(const int64_t* table, int row, int which) {
    return reinterpret_cast<T*>(column(table, row, which));
}

// The dtypes of a row, by an access to the lower half of their column alone: the upper half of the
// first row's is the ticket, which other CTAs may be counting up by atomics (step_kernel.cuh).
__device__ __forceinline__ int64_t packed_of(const int64_t* table, int row) {
    const int64_t* const packed = table + static_cast<int64_t>(row) * COLUMNS + PACKED;
    return *reinterpret_cast<const uint32_t*>(packed);
}

// math/optimizers/table.h's dtype_of, which is a host function.
__device__ __forceinline__ int code_of(int64_t packed, Field field) {
    return static_cast<int>(packed >> (4 * field)) & 15;
}

__device__ __forceinline__ int64_t chunks_of(int64_t numel) { return (numel + CHUNK - 1) / CHUNK; }

struct WarpVote {
    template <typename Holds>
    __device__ __forceinline__ int operator()(const Holds& holds) const {
        return __popc(__ballot_sync(0xffffffffu, holds(static_cast<int>(threadIdx.x) % LANES)));
    }
};

// Calls enter(row) when a CTA comes to another row, then chunk(index within the row) for each chunk
// that is its own. Every warp looks rows up for itself, so nothing waits; `rows` has count,
// first(row) and numel(row).
template <typename Rows, typename Enter, typename Chunk>
__device__ __forceinline__ void sweep(const Rows& rows, const Enter& enter, const Chunk& chunk) {
    const int last = rows.count - 1;
    const int64_t chunks = rows.first(last) + chunks_of(rows.numel(last));
    for (int64_t slab = 0; slab < chunks; slab += gridDim.x * SPAN) {
        const Range span = span_of(slab, blockIdx.x, gridDim.x, chunks);
        int64_t first = 0, next = 0;
        for (int64_t c = span.begin; c < span.end; ++c) {
            if (c >= next || c == span.begin) {
                const int row =
                    row_of([&](int r) { return rows.first(r); }, rows.count, c, WarpVote{});
                first = rows.first(row);
                next = first + chunks_of(rows.numel(row));
                enter(row);
            }
            chunk(c - first);
        }
    }
}

}  // namespace pyops::cuda
