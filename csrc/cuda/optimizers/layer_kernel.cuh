// The layer-wise optimizers on CUDA: every row cut into SLICES parts, or as many as it has chunks,
// whose sums are added in their order.
//
//   first   CTAs take (row, slice) in turn: moments, and the slice's squared norms
//           -> partial[row][slice]
//   add up  one CTA per row, one slice per thread -> norms[row]
//   second  the persistent walk of step_kernel.cuh, with the rate that follows from the row's norms
//
// A norm's bits depend on the row's length and alignment alone, not on the grid. Nothing is read
// back to the host.
#pragma once

#include "../../math/optimizers/lamb.h"
#include "../../math/optimizers/lars.h"
#include "step_kernel.cuh"

namespace pyops::cuda {

static_assert(SLICES == THREADS, "a slice for each thread of add_up_kernel");

struct SquaredNorms {
    double param, other;
};

// What the kernels need of a step beside the table; the options are LambOptions or LarsOptions.
template <typename Options>
struct LayerArguments {
    int64_t* table;
    int rows;
    const void* lr;  // null: the options'
    bool lr_is_double;
    const float* grad_factor;
    const float* found_inf;
    Options options;
    bool zero_grads;
    uint64_t seed;
    SquaredNorms *partial, *norms;

    __device__ __forceinline__ bool skips() const { return found_inf && *found_inf != 0.0f; }
    __device__ __forceinline__ double factor() const {
        return grad_factor ? static_cast<double>(*grad_factor) : 1.0;
    }
    __device__ __forceinline__ double rate(double given) const {
        return !lr            ? given
               : lr_is_double ? *static_cast<const double*>(lr)
                              : static_cast<double>(*static_cast<const float*>(lr));
    }
};

template <int N>
__device__ __forceinline__ void square_into(double& sum, const float (&values)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k)
        sum = fma(static_cast<double>(values[k]), static_cast<double>(values[k]), sum);
}

template <typename D, int N, int EACH>
__device__ __forceinline__ void load_weight(const RowInMemory& row, int64_t i, float (&p)[N]) {
    const bool master = D::W == NONE ? false : (D::W == DYNAMIC ? row.master != nullptr : true);
    widen(load_as<D::W == NONE ? D::P : D::W, N, EACH>(
              master ? row.master : row.param, i, row.dtype(master ? MASTER_DTYPE : PARAM_DTYPE)),
          p);
}

// LAMB's first pass on N elements: the moments as they are stored, and the update that follows from
// them.
struct LambFirst {
    using Options = LambOptions;
    static constexpr unsigned REQUIRED_COLUMNS = OF_ANY_RULE | set_of(EXP_AVG, EXP_AVG_SQ);
    Lamb<float> rule;

    __device__ __forceinline__ void enter(const LayerArguments<Options>& a, float step) {
        rule = Lamb<float>(a.options, a.factor(), step);
    }

    template <typename D, bool SR, int N, int EACH>
    __device__ __forceinline__ void operator()(const LayerArguments<Options>& a,
                                               const RowInMemory& row, int64_t i, double& param,
                                               double& other) const {
        float p[N], g[N], m[N], v[N];
        // What is narrower than the others last: where the dtype is chosen at run time, its
        // conversion waits for it.
        load_weight<D, N, EACH>(row, i, p);
        widen(load_as<D::M, N, EACH>(row.exp_avg, i, row.dtype(MOMENT_DTYPE)), m);
        widen(load_as<D::M, N, EACH>(row.exp_avg_sq, i, row.dtype(MOMENT_DTYPE)), v);
        widen(load_as<D::G, N, EACH>(row.grad, i, row.dtype(GRAD_DTYPE)), g);
#pragma unroll
        for (int k = 0; k < N; ++k) rule.moments(g[k], m[k], v[k]);
        const int moment = row.dtype(MOMENT_DTYPE);
        store_state<D::M, SR, N, EACH>(row.exp_avg, i, moment, m, row, a.seed, 1);
        store_state<D::M, SR, N, EACH>(row.exp_avg_sq, i, moment, v, row, a.seed, 2);
        square_into<N>(param, p);
#pragma unroll
        for (int k = 0; k < N; ++k) g[k] = rule.update(p[k], m[k], v[k]);
        square_into<N>(other, g);
        if (a.zero_grads) {
            float zeros[N] = {};
            store_as<D::G, N, EACH>(row.grad, i, row.dtype(GRAD_DTYPE), zeros, ToNearest{});
        }
    }
};

// LARS's first pass: norms of parameter and gradient, nothing written.
struct LarsFirst {
    using Options = LarsOptions;
    static constexpr unsigned REQUIRED_COLUMNS = OF_ANY_RULE;

    __device__ __forceinline__ void enter(const LayerArguments<Options>&, float) {}

    template <typename D, bool SR, int N, int EACH>
    __device__ __forceinline__ void operator()(const LayerArguments<Options>&,
                                               const RowInMemory& row, int64_t i, double& param,
                                               double& other) const {
        float p[N], g[N];
        load_weight<D, N, EACH>(row, i, p);
        widen(load_as<D::G, N, EACH>(row.grad, i, row.dtype(GRAD_DTYPE)), g);
        square_into<N>(param, p);
        square_into<N>(other, g);
    }
};

template <typename First>
struct FirstRow : RowInMemory {
    First first;
};

// The packs of a chunk: dtypes that people train with have code of their own.
template <typename First, typename D, bool SR>
__device__ __forceinline__ void first_of(const LayerArguments<typename First::Options>& a,
                                         const FirstRow<First>& row, Range packs, double& param,
                                         double& other) {
    const auto pack = [&](int64_t i) {
        row.first.template operator()<D, SR, 4, 1>(a, row, i, param, other);
    };
    walk_packs<4, 1>(packs, threadIdx.x, THREADS, pack, pack);
}

// The elements of a row whose operands can't be brought into line, in the order of one at a time:
// see update_out_of_line.
template <typename First, bool SR>
__device__ __forceinline__ void first_out_of_line(const LayerArguments<typename First::Options>& a,
                                                  const FirstRow<First>& row, Range elements,
                                                  double& param, double& other) {
    const auto one = [&](int64_t i) {
        row.first.template operator()<Generic, SR, 1, 1>(a, row, i, param, other);
    };
    if constexpr (SR) {
        walk_packs<1, 1>(elements, threadIdx.x, THREADS, one, one);
    } else {
        const auto four = [&](int64_t i) {
            row.first.template operator()<Generic, SR, 4, THREADS>(a, row, i, param, other);
        };
        walk_packs<1, 4>(elements, threadIdx.x, THREADS, four, one);
    }
}

template <typename First, bool SR>
__device__ __forceinline__ SquaredNorms first_slice(
    const LayerArguments<typename First::Options>& a, const FirstRow<First>& row, Range chunks) {
    double param = 0.0, other = 0.0;
    for (int64_t index = chunks.begin; index < chunks.end; ++index) {
        const Range range = elements_of(index, row.numel, CHUNK, row.head);
        const Range packs = packs_of(range, index == 0 ? row.head : 0, row.pack);
        switch (row.kind) {
            case key<Dtypes<FP32, FP32, FP32, NONE>>:
                first_of<First, Dtypes<FP32, FP32, FP32, NONE>, SR>(a, row, packs, param, other);
                break;
            case key<Dtypes<BF16, BF16, FP32, FP32>>:
                first_of<First, Dtypes<BF16, BF16, FP32, FP32>, SR>(a, row, packs, param, other);
                break;
            case SCALAR_KEY: first_out_of_line<First, SR>(a, row, packs, param, other); break;
            default: first_of<First, Generic, SR>(a, row, packs, param, other);
        }
        walk_edges(range, packs, threadIdx.x, THREADS, [&](int64_t i) {
            row.first.template operator()<Generic, SR, 1, 1>(a, row, i, param, other);
        });
    }
    return {block_sum<THREADS>(param), block_sum<THREADS>(other)};
}

template <typename First, bool SR>
__global__ __launch_bounds__(THREADS, 3) void first_kernel(
    const __grid_constant__ LayerArguments<typename First::Options> a) {
    if (a.skips()) {
        if (a.zero_grads) zero_all_grads(a);
        return;
    }
    __shared__ FirstRow<First> row;
    if (threadIdx.x == 0) row.step = -1.0f;
    const int64_t items = static_cast<int64_t>(a.rows) * SLICES;
    int entered = -1;
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int r = static_cast<int>(item / SLICES), slice = static_cast<int>(item % SLICES);
        // Before the row is entered, which takes one thread longer than a chunk takes all of them:
        // a small layer has few slices.
        const int64_t chunks = chunks_of(column(a.table, r, NUMEL));
        if (slice >= slices_of(chunks)) continue;
        if (r != entered) {
            __syncthreads();  // the row before has been read
            if (threadIdx.x == 0) {
                row.point_to(a.table, r, First::REQUIRED_COLUMNS);
                const float step = *pointer<const float>(a.table, r, STEP) + 1.0f;
                if (step != row.step) row.first.enter(a, step);  // most rows share it
                row.step = step;
            }
            __syncthreads();
            entered = r;
        }
        const SquaredNorms sums = first_slice<First, SR>(
            a, row, {slice_begin(slice, chunks), slice_begin(slice + 1, chunks)});
        if (threadIdx.x == 0) a.partial[item] = sums;
    }
}

template <typename Options>
__global__ __launch_bounds__(THREADS) void add_up_kernel(
    const __grid_constant__ LayerArguments<Options> a) {
    if (a.skips()) return;
    for (int r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const int slices = slices_of(chunks_of(column(a.table, r, NUMEL)));
        SquaredNorms mine{0.0, 0.0};
        if (static_cast<int>(threadIdx.x) < slices)
            mine = a.partial[static_cast<int64_t>(r) * SLICES + threadIdx.x];
        const double param = block_sum<THREADS>(mine.param), other = block_sum<THREADS>(mine.other);
        if (threadIdx.x == 0) a.norms[r] = {param, other};
    }
}

__device__ __forceinline__ void set_rule(LambApply<float>& rule,
                                         const LayerArguments<LambOptions>& a, int r, float step) {
    LambOptions options = a.options;
    options.lr = a.rate(options.lr);
    rule = LambApply<float>(
        options, step,
        trust_ratio(a.norms[r].param, a.norms[r].other, options.min_ratio, options.max_ratio));
}

template <typename Rule>
__device__ __forceinline__ void set_rule(Rule& rule, const LayerArguments<LarsOptions>& a, int r,
                                         float step) {
    LarsOptions options = a.options;
    options.sgd.lr = a.rate(options.sgd.lr);
    rule = lars_rule<Rule>(options, a.factor(), step,
                           local_rate(options, a.norms[r].param, a.norms[r].other, a.factor()));
}

// The walk of step_kernel with a rule for each row; layers of one parameter follow each other and
// share its step.
template <template <typename> class R, bool SR, typename Options>
__global__ __launch_bounds__(THREADS, 3) void second_kernel(
    const __grid_constant__ LayerArguments<Options> a, const __grid_constant__ StepArguments<R> s) {
    if (a.skips()) {
        if (holds(R<float>::COLUMNS, GRAD) && s.zero_grads) zero_all_grads(a);
        return;
    }
    __shared__ StepRow<R> row;
    const auto enter = [&](int r) {
        __syncthreads();
        if (threadIdx.x == 0) {
            row.point_to(a.table, r, REQUIRED<R<float>>);
            row.step = *pointer<const float>(a.table, r, STEP) + 1.0f;
            set_rule(row.rule, a, r, row.step);
        }
        __syncthreads();
    };
    sweep(TableRows{a.table, a.rows}, enter, UpdateChunk<R, SR>{row, s});
    if (!last_cta(ticket_of(a.table))) return;
    for (int r = threadIdx.x; r < a.rows; r += THREADS)
        if (r == 0 || column(a.table, r, STEP) != column(a.table, r - 1, STEP))
            *pointer<float>(a.table, r, STEP) += 1.0f;
}

}  // namespace pyops::cuda
