// The kernel of accumulate_, sum_rows_ and scale_cast_:
//
//   out = round(scale * (((first + rows[0]) + rows[1]) + ...))
//         summed in list order, in fp32 (fp64 for fp64), rounded once
//
// where `first` is `out` itself for accumulate_. Bytes per element: one read per addend, one write.
#pragma once

#include "../pack.cuh"
#include "../partition.cuh"

namespace pyops::cuda {

constexpr int SUM_THREADS = 256;
constexpr int MAX_ADDENDS = 256;  // pointers that travel as kernel arguments

struct Rows {
    const void* data[MAX_ADDENDS];
    int count;
};

// N elements, EACH apart.
template <int OUT, int IN, int N, typename Scalar, int EACH = 1>
__device__ __forceinline__ void sum_pack(void* out, const Rows& rows, bool with_out, Scalar scale,
                                         int64_t i) {
    Scalar sum[N];
    int r = 0;
    if (with_out) {
        const auto pack = load_each<OUT, N, EACH>(out, i);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = widen(pack.element[j]);
    } else {
        const auto pack = load_each<IN, N, EACH>(rows.data[r++], i);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] = widen(pack.element[j]);
    }
#pragma unroll 4
    for (; r < rows.count; ++r) {
        const auto pack = load_each<IN, N, EACH>(rows.data[r], i);
#pragma unroll
        for (int j = 0; j < N; ++j) sum[j] += widen(pack.element[j]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] *= scale;
    Pack<OUT, N> rounded;
#pragma unroll
    for (int j = 0; j < N; ++j) rounded.element[j] = narrow<OUT>(sum[j]);
    store_each<OUT, N, EACH>(out, i, rounded);
}

template <int OUT, int IN, int N, typename Scalar>
__global__ __launch_bounds__(SUM_THREADS) void sum_kernel(void* out,
                                                          const __grid_constant__ Rows rows,
                                                          bool with_out, Scalar scale,
                                                          int64_t numel, int head) {
    const int64_t chunks = (numel + CHUNK - 1) / CHUNK;
    const auto pack = [&](int64_t i) {
        sum_pack<OUT, IN, N, Scalar>(out, rows, with_out, scale, i);
    };
    const auto one = [&](int64_t i) {
        sum_pack<OUT, IN, 1, Scalar>(out, rows, with_out, scale, i);
    };
    for (int64_t slab = 0; slab < chunks; slab += gridDim.x * SPAN) {
        const Range span = span_of(slab, blockIdx.x, gridDim.x, chunks);
        for (int64_t c = span.begin; c < span.end; ++c) {
            const Range range = elements_of(c, numel, CHUNK, head),
                        packs = packs_of(range, c == 0 ? head : 0, N);
            if constexpr (N == 1) {  // out of line: four of a thread are in flight
                const auto four = [&](int64_t i) {
                    sum_pack<OUT, IN, 4, Scalar, SUM_THREADS>(out, rows, with_out, scale, i);
                };
                walk_packs<1, 4>(packs, threadIdx.x, SUM_THREADS, four, pack);
            } else {
                walk_packs<N, 1>(packs, threadIdx.x, SUM_THREADS, pack, pack);
            }
            walk_edges(range, packs, threadIdx.x, SUM_THREADS, one);
        }
    }
}

}  // namespace pyops::cuda
