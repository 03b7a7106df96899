// ZeRO's step over symmetric memory in one kernel: reduce-scatter, optimizer's rule, all-gather.
//
//   meet                                       every rank's gradients are there
//   g = round(scale * sum of ranks' gradients) in fp32, in the order of ranks
//   rule                                       on this rank's shard: moments, master
//   store the parameter into every rank        rounded once
//   meet                                       parameters have come, gradients were read
//
// The table holds the rows of this rank's shard alone; their gradients and parameters lie in
// symmetric memory, and those of rank p at the same distance from its own buffers. The shard's own
// memory traffic hides behind that of the links. The bits are those of the three steps one after
// the other. The step must not depend on the sum itself: no norm to clip by.
#pragma once

#include "reduce.cuh"
#include "../optimizers/step_kernel.cuh"
#include "symmetric_meeting.cuh"

namespace pyops::cuda {

template <template <typename> class R>
struct SymmetricStep {
    StepArguments<R> step;  // whose zero_grads is not looked at
    Peers peers;
    // Bytes from this rank's gradients and parameters to those of each rank.
    int64_t grads[MAX_PEERS], params[MAX_PEERS];
    float scale;
    bool in_fp32;  // the rule is given the sum itself, not rounded to the gradients' dtype
};

template <int DTYPE, int N, typename Arguments>
__device__ __forceinline__ void sum_of_gradients(const Arguments& a, const RowInMemory& row,
                                                 int64_t i, float (&g)[N]) {
    const auto sum = [&](auto code) {
        constexpr int KNOWN = decltype(code)::value;
        widen(load<KNOWN, N>(row.grad + a.grads[0], i), g);
#pragma unroll 4
        for (int p = 1; p < a.peers.size; ++p) {
            const auto pack = load<KNOWN, N>(row.grad + a.grads[p], i);
#pragma unroll
            for (int j = 0; j < N; ++j) g[j] += widen(pack.element[j]);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            g[j] *= a.scale;
            if (!a.in_fp32) g[j] = widen(narrow<KNOWN>(g[j]));
        }
    };
    if constexpr (DTYPE != DYNAMIC) {
        sum(Code<DTYPE>{});
    } else {
        with_dtype(row.dtype(GRAD_DTYPE), sum);
    }
}

template <int DTYPE, int N, typename Arguments>
__device__ __forceinline__ void store_to_all(const Arguments& a, const RowInMemory& row, int64_t i,
                                             const float (&values)[N]) {
    const auto store_rounded = [&](auto code) {
        constexpr int KNOWN = decltype(code)::value;
        Pack<KNOWN, N> pack;
#pragma unroll
        for (int j = 0; j < N; ++j) pack.element[j] = narrow<KNOWN>(values[j]);
        for (int p = 0; p < a.peers.size; ++p) store<KNOWN, N>(row.param + a.params[p], i, pack);
    };
    if constexpr (DTYPE != DYNAMIC) {
        store_rounded(Code<DTYPE>{});
    } else {
        with_dtype(row.dtype(PARAM_DTYPE), store_rounded);
    }
}

template <template <typename> class R, typename D, int N>
__device__ __forceinline__ void step_piece(const StepRow<R>& row, const SymmetricStep<R>& a,
                                           int64_t i) {
    using Rule = R<float>;
    constexpr int W = D::W == NONE ? D::P : D::W;
    const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
    float p[N], g[N], m[N] = {}, v[N] = {}, top[N] = {};
    widen(load_as<W, N>(master ? row.master : row.param, i,
                        row.dtype(master ? MASTER_DTYPE : PARAM_DTYPE)),
          p);
    if constexpr (holds(Rule::COLUMNS, EXP_AVG))
        widen(load_as<D::M, N>(row.exp_avg, i, row.dtype(MOMENT_DTYPE)), m);
    if constexpr (holds(Rule::COLUMNS, EXP_AVG_SQ))
        widen(load_as<D::M, N>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE)), v);
    sum_of_gradients<D::G, N>(a, row, i, g);
    with_variant<(Rule::WITH_MAX ? Rule::WITH_MAX : Rule::VARIANTS)>(
        row.rule.variant(), [&](auto variant) {
#pragma unroll
            for (int k = 0; k < N; ++k)
                row.rule.template operator()<decltype(variant)::value>(p[k], g[k], m[k], v[k],
                                                                       top[k]);
        });
    if constexpr (holds(Rule::WRITTEN, EXP_AVG))
        store_as<D::M, N>(row.exp_avg, i, row.dtype(MOMENT_DTYPE), m, ToNearest{});
    if constexpr (holds(Rule::WRITTEN, EXP_AVG_SQ))
        store_as<D::M, N>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE), v, ToNearest{});
    if (master)
        store_as<D::W == NONE ? FP32 : D::W, N>(row.master, i, row.dtype(MASTER_DTYPE), p,
                                                ToNearest{});
    store_to_all<D::P, N>(a, row, i, p);
}

// Any dtypes; not inlined, because its registers are not those of the known combinations.
template <template <typename> class R, int N>
__device__ __noinline__ void step_any(const StepRow<R>& row, const SymmetricStep<R>& a, int64_t i) {
    step_piece<R, Generic, N>(row, a, i);
}

template <template <typename> class R, typename D>
__device__ __forceinline__ void step_known(const StepRow<R>& row, const SymmetricStep<R>& a,
                                           Range packs) {
    const auto pack = [&](int64_t i) { step_piece<R, D, D::PACK>(row, a, i); };
    walk_packs<D::PACK, 1>(packs, threadIdx.x, THREADS, pack, pack);
}

template <template <typename> class R>
struct StepChunk {
    const StepRow<R>& row;
    const SymmetricStep<R>& a;

    __device__ __forceinline__ void operator()(int64_t index) const {
        const Range range = elements_of(index, row.numel, CHUNK, row.head);
        const Range packs = packs_of(range, index == 0 ? row.head : 0, row.pack);
        const auto one = [&](int64_t i) { step_any<R, 1>(row, a, i); };
        const auto four = [&](int64_t i) { step_any<R, 4>(row, a, i); };
        switch (row.kind) {
            case key<Dtypes<FP32, FP32, FP32, NONE>>:
                step_known<R, Dtypes<FP32, FP32, FP32, NONE>>(row, a, packs);
                break;
            case key<Dtypes<BF16, BF16, FP32, FP32>>:
                step_known<R, Dtypes<BF16, BF16, FP32, FP32>>(row, a, packs);
                break;
            case key<Dtypes<BF16, BF16, BF16, NONE>>:
                step_known<R, Dtypes<BF16, BF16, BF16, NONE>>(row, a, packs);
                break;
            case SCALAR_KEY: walk_packs<1, 1>(packs, threadIdx.x, THREADS, one, one); break;
            default: walk_packs<4, 1>(packs, threadIdx.x, THREADS, four, four);
        }
        walk_edges(range, packs, threadIdx.x, THREADS, one);
    }
};

template <template <typename> class R>
__global__ __launch_bounds__(THREADS) void symmetric_step_kernel(
    const __grid_constant__ SymmetricStep<R> a) {
    const uint32_t epoch = epoch_of(a.peers);
    if (!meet(a.peers, epoch + 1)) return;
    const bool skipped = a.step.found_inf && *a.step.found_inf != 0.0f;  // alike on all ranks
    if (a.step.rows > 0 && !skipped) {
        __shared__ StepRow<R> row;
        if (threadIdx.x == 0) row.step = -1.0f;
        const auto enter = [&](int r) {
            __syncthreads();
            if (threadIdx.x == 0) row.enter(a.step, r);
            __syncthreads();
        };
        sweep(TableRows{a.step.table, a.step.rows}, enter, StepChunk<R>{row, a});
    }
    if (!meet(a.peers, epoch + 2)) return;
    leave_epoch(a.peers, epoch + 2);
    if (R<float>::COUNTS && last_cta(&a.peers.pad[a.peers.rank]->ticket) && !skipped)
        for (int r = threadIdx.x; r < a.step.rows; r += THREADS)
            *pointer<float>(a.step.table, r, STEP) += 1.0f;
}

}  // namespace pyops::cuda
