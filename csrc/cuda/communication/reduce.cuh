// Reductions whose order is fixed by the thread and CTA indices alone, so that every run gives the
// same bits.
//
//   lanes of a warp   ->   warps of a CTA   ->   CTAs, by the last CTA to finish
//   xor butterfly          in warp order         in CTA order (never in order of arrival)
#pragma once

#include <cuda_runtime.h>

namespace pyops::cuda {

constexpr int WARP = 32;

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
    for (int other = WARP / 2; other > 0; other /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
}

// Sum over a CTA of THREADS threads; every thread calls it, thread 0 gets the sum.
template <int THREADS, typename T>
__device__ __forceinline__ T block_sum(T value) {
    static_assert(THREADS % WARP == 0 && THREADS <= WARP * WARP,
                  "whole warps, and one warp to sum the warps");
    constexpr int WARPS = THREADS / WARP;
    __shared__ T of_warp[WARPS];
    value = warp_sum(value);
    __syncthreads();  // warp 0 may still be reading what the sum before this one left there
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = value;
    __syncthreads();
    T sum{};
    if (threadIdx.x < WARP)
        sum = warp_sum(static_cast<int>(threadIdx.x) < WARPS ? of_warp[threadIdx.x] : T{});
    return sum;
}

// True in every thread of exactly one CTA of the grid: the last to come here. What any CTA wrote
// before is visible to it.
// The ticket returns to zero by itself, so that the next launch finds it so.
__device__ __forceinline__ bool last_cta(unsigned* ticket) {
    __shared__ bool last;
    __syncthreads();  // what other threads than the first wrote is to be seen, too
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
        if (last) __threadfence();
    }
    __syncthreads();
    return last;
}

}  // namespace pyops::cuda
