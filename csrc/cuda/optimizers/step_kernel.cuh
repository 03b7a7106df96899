// The persistent kernel of an elementwise optimizer over a whole table of parameters.
//
//   every CTA     reads step + 1 of the rows it works on, updates its chunks
//   the last CTA  to finish increments the steps of all rows: nobody can have read a new one
//
// The ticket that tells the last CTA lives in the upper half of the first row's dtypes column, and
// is zero again at the end.
#pragma once

#include "../communication/reduce.cuh"
#include "step_row.cuh"

namespace pyops::cuda {

// A word of the table rather than of the launch: no allocation and no memset per step, and tables
// of two streams don't share it. dtypes need the lower half only.
__device__ __forceinline__ unsigned* ticket_of(int64_t* table) {
    return reinterpret_cast<unsigned*>(table + PACKED) + 1;
}

struct TableRows {
    const int64_t* table;
    int count;
    __device__ __forceinline__ int64_t numel(int row) const { return column(table, row, NUMEL); }
    __device__ __forceinline__ int64_t first(int row) const {
        return column(table, row, FIRST_CHUNK);
    }
};

// The combinations with code of their own; everything else goes element by element through run-time
// dtypes, four at a time.
template <template <typename> class R, bool SR>
__device__ __forceinline__ void update_known(const StepRow<R>& row, const StepArguments<R>& a,
                                             Range packs) {
#define PYOPS_CASE(...)            \
    case key<Dtypes<__VA_ARGS__>>: \
        return update_packs<R, Dtypes<__VA_ARGS__>, SR, Dtypes<__VA_ARGS__>::PACK>(row, a, packs)
    const auto generic = [&](int64_t i) { update_any<R, SR, 4>(row, a, i); };
    switch (row.kind) {
        PYOPS_CASE(FP32, FP32, FP32, NONE);
        PYOPS_CASE(FP32, FP32, BF16, NONE);
        PYOPS_CASE(FP32, FP32, FP16, NONE);
        PYOPS_CASE(FP32, BF16, FP32, NONE);
        PYOPS_CASE(BF16, BF16, FP32, NONE);
        PYOPS_CASE(BF16, BF16, FP32, FP32);
        PYOPS_CASE(BF16, FP32, FP32, FP32);
        PYOPS_CASE(BF16, BF16, BF16, NONE);
        PYOPS_CASE(FP16, FP16, FP32, FP32);
        PYOPS_CASE(FP16, FP32, FP32, FP32);
        PYOPS_CASE(FP16, FP16, FP16, NONE);
        case SCALAR_KEY: return update_out_of_line<R, SR>(row, a, packs);
        default: return walk_packs<4, 1>(packs, threadIdx.x, THREADS, generic, generic);
    }
#undef PYOPS_CASE
}

// found_inf: nothing changes, but the gradients are zeroed where the step would have.
template <typename Arguments>
__device__ __forceinline__ void zero_all_grads(const Arguments& a) {
    char* grad = nullptr;
    int64_t numel = 0;
    int size = 0;
    const auto enter = [&](int row) {
        grad = pointer<char>(a.table, row, GRAD);
        numel = column(a.table, row, NUMEL);
        size = bytes_of(code_of(packed_of(a.table, row), GRAD_DTYPE));
    };
    const auto chunk = [&](int64_t index) {
        const Range range = elements_of(index, numel, CHUNK, 0);
        for (int64_t i = range.begin + threadIdx.x; i < range.end; i += THREADS) {
            if (size == 4) {
                reinterpret_cast<uint32_t*>(grad)[i] = 0;
            } else {
                reinterpret_cast<uint16_t*>(grad)[i] = 0;
            }
        }
    };
    sweep(TableRows{a.table, a.rows}, enter, chunk);
}

template <template <typename> class R, bool SR>
struct UpdateChunk {
    const StepRow<R>& row;
    const StepArguments<R>& a;
    __device__ __forceinline__ void operator()(int64_t index) const {
        const Range range = elements_of(index, row.numel, CHUNK, row.head);
        const Range packs = packs_of(range, index == 0 ? row.head : 0, row.pack);
        update_known<R, SR>(row, a, packs);
        walk_edges(range, packs, threadIdx.x, THREADS,
                   [&](int64_t i) { update_any<R, SR, 1>(row, a, i); });
    }
};

// CTAs at once on a multiprocessor: with random rounding, or with both moments, 64 registers would
// not do.
template <typename Rule, bool SR>
constexpr int RESIDENT =
    SR || (Rule::WRITTEN & set_of(EXP_AVG, EXP_AVG_SQ)) == set_of(EXP_AVG, EXP_AVG_SQ) ? 3 : 4;

template <template <typename> class R, bool SR>
__global__ __launch_bounds__(THREADS, (RESIDENT<R<float>, SR>)) void step_kernel(
    const __grid_constant__ StepArguments<R> a) {
    if (a.found_inf && *a.found_inf != 0.0f) {
        if (holds(R<float>::COLUMNS, GRAD) && a.zero_grads) zero_all_grads(a);
        return;
    }
    __shared__ StepRow<R> row;  // in shared memory rather than in every thread's registers
    if (threadIdx.x == 0) row.step = -1.0f;
    const auto enter = [&](int r) {
        __syncthreads();
        if (threadIdx.x == 0) row.enter(a, r);
        __syncthreads();
    };
    sweep(TableRows{a.table, a.rows}, enter, UpdateChunk<R, SR>{row, a});
    if constexpr (R<float>::COUNTS) {
        if (!last_cta(ticket_of(a.table))) return;
        for (int r = threadIdx.x; r < a.rows; r += THREADS)
            *pointer<float>(a.table, r, STEP) += 1.0f;
    }
}

}  // namespace pyops::cuda
