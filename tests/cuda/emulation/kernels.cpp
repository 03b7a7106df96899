// The CUDA kernels as functions of the host, for tests/cuda/test_kernels.py: no GPU and no nvcc
// needed.
#include <cuda_runtime.h>

#include "../../../csrc/cuda/optimizers/adafactor_kernel.cuh"
#include "../../../csrc/cuda/optimizers/grad_norm_kernel.cuh"
#include "../../../csrc/cuda/optimizers/layer_kernel.cuh"
#include "../../../csrc/cuda/random_kernel.cuh"
#include "../../../csrc/cuda/communication/reduce_kernel.cuh"
#include "../../../csrc/cuda/optimizers/step_kernel.cuh"
#include "../../../csrc/math/optimizers/adagrad.h"
#include "../../../csrc/math/optimizers/adam.h"
#include "../../../csrc/math/optimizers/frozen_adam.h"
#include "../../../csrc/math/optimizers/lion.h"
#include "../../../csrc/math/optimizers/sgd.h"

using namespace pyops;
using namespace pyops::cuda;

namespace {

template <int OUT, int IN, int N>
void sum(unsigned grid, void* out, const Rows& rows, bool with_out, double scale, int64_t numel,
         int head) {
    using Scalar = std::conditional_t<OUT == FP64, double, float>;
    emulation::launch(grid, SUM_THREADS, [&] {
        sum_kernel<OUT, IN, N, Scalar>(out, rows, with_out, static_cast<Scalar>(scale), numel,
                                       head);
    });
}

template <template <typename> class R>
void step(unsigned grid, StepArguments<R>& a, const typename R<float>::Options& options,
          bool stochastic_rounding) {
    a.options = options;
    emulation::launch(grid, THREADS, [&] {
        stochastic_rounding ? step_kernel<R, true>(a) : step_kernel<R, false>(a);
    });
}

template <template <typename> class R, typename Options>
void second_step(const LayerArguments<Options>& a, const StepArguments<R>& steps, bool stochastic) {
    stochastic ? second_kernel<R, true, Options>(a, steps)
               : second_kernel<R, false, Options>(a, steps);
}

}  // namespace

extern "C" {

// rule: 0 adam, 1 sgd, 2 lion, 3 adagrad, 4 frozen_adam, 5 momentum. options: the numbers of the
// rule's Options in their order. flags: 1 decoupled or nesterov, 2 maximize, 4 zero_grads, 8
// stochastic rounding
void emulated_step(unsigned grid, int rule, int64_t* table, int rows, const void* lr,
                   int lr_is_double, const float* grad_factor, const float* found_inf,
                   const double* o, int flags, uint64_t seed) {
    const bool first = flags & 1, maximize = flags & 2, stochastic = flags & 8;
    const auto run = [&](auto arguments, const auto& options) {
        arguments.table = table;
        arguments.rows = rows;
        arguments.lr = lr;
        arguments.lr_is_double = lr_is_double;
        arguments.grad_factor = grad_factor;
        arguments.found_inf = found_inf;
        arguments.zero_grads = flags & 4;
        arguments.seed = seed;
        step(grid, arguments, options, stochastic);
    };
    if (rule == 0)
        run(StepArguments<Adam>{}, AdamOptions{o[0], o[1], o[2], o[3], o[4], first, maximize});
    if (rule == 1 && o[1] != 0.0)
        run(StepArguments<MomentumSgd>{}, SgdOptions{o[0], o[1], o[2], o[3], first, maximize});
    if (rule == 1 && o[1] == 0.0)
        run(StepArguments<PlainSgd>{}, SgdOptions{o[0], o[1], o[2], o[3], first, maximize});
    if (rule == 2) run(StepArguments<Lion>{}, LionOptions{o[0], o[1], o[2], o[3], maximize});
    if (rule == 3) run(StepArguments<Adagrad>{}, AdagradOptions{o[0], o[1], o[2], o[3], maximize});
    if (rule == 4) run(StepArguments<FrozenAdam>{}, FrozenAdamOptions{o[0], o[1], o[2]});
    if (rule == 5) run(StepArguments<Momentum>{}, MomentumOptions{o[0]});
}

// kind: 0 LAMB, 1 LARS. options: the numbers of LambOptions, or of SgdOptions and LarsOptions, in
// their order; partial: room for rows * SLICES pairs. flags: 1 nesterov, 2 maximize, 4 zero_grads,
// 8 stochastic rounding
void emulated_layers(unsigned grid, int kind, int64_t* table, int rows, const void* lr,
                     int lr_is_double, const float* grad_factor, const float* found_inf,
                     const double* o, int flags, uint64_t seed, double* partial, double* norms) {
    const bool nesterov = flags & 1, maximize = flags & 2, zero_grads = flags & 4,
               stochastic = flags & 8;
    const auto fill = [&](auto& a) {
        a.table = table;
        a.rows = rows;
        a.lr = lr;
        a.lr_is_double = lr_is_double;
        a.grad_factor = grad_factor;
        a.found_inf = found_inf;
        a.seed = seed;
        a.partial = reinterpret_cast<SquaredNorms*>(partial);
        a.norms = reinterpret_cast<SquaredNorms*>(norms);
    };
    const auto second = [&](auto steps, const auto& a, bool zeroes) {
        steps.table = table;
        steps.rows = rows;
        steps.zero_grads = zeroes;
        steps.seed = seed;
        emulation::launch(grid, THREADS, [&] { second_step(a, steps, stochastic); });
    };
    if (kind == 0) {
        LayerArguments<LambOptions> a{};
        fill(a);
        a.options = {o[0], o[1], o[2], o[3], o[4], o[5], o[6], true, maximize};
        a.zero_grads = zero_grads;
        emulation::launch(grid, THREADS, [&] {
            stochastic ? first_kernel<LambFirst, true>(a) : first_kernel<LambFirst, false>(a);
        });
        emulation::launch(grid, THREADS, [&] { add_up_kernel(a); });
        second(StepArguments<LambApply>{}, a, false);
    } else {
        LayerArguments<LarsOptions> a{};
        fill(a);
        a.options = {{o[0], o[1], o[2], o[3], nesterov, maximize}, o[4], o[5], true};
        emulation::launch(grid, THREADS, [&] { first_kernel<LarsFirst, false>(a); });
        emulation::launch(grid, THREADS, [&] { add_up_kernel(a); });
        if (o[1] != 0.0)
            second(StepArguments<MomentumSgd>{}, a, zero_grads);
        else
            second(StepArguments<PlainSgd>{}, a, zero_grads);
    }
}

// shapes: matrices, rows and columns of each tensor; of a vector 0, 0 and its length. options: the
// first numbers of AdafactorOptions in their order; flags: 2 maximize, 4 zero_grads, 8 stochastic
// rounding
void emulated_adafactor(unsigned grid, int64_t* table, int rows, const int64_t* shapes,
                        const float* const* row_vars, const float* const* col_vars,
                        const float* const* variances, const double* leasts, const void* lr,
                        int lr_is_double, const float* grad_factor, const float* found_inf,
                        const double* o, int flags, uint64_t seed) {
    AdafactorPlan plan;
    for (int r = 0; r < rows; ++r) {
        const int64_t* const shape = shapes + 3 * r;
        if (shape[0])
            plan.add(shape[0], shape[1], shape[2], row_vars[r], col_vars[r], nullptr, leasts[r]);
        else if (shape[2])
            plan.add(1, 1, shape[2], nullptr, nullptr, variances[r], leasts[r]);
        else
            plan.add(0, 1, 1, nullptr, nullptr, nullptr, leasts[r]);
    }
    std::vector<double> workspace(static_cast<size_t>(plan.workspace()), NAN);
    AdafactorArguments a{};
    a.table = table;
    a.rows = rows;
    a.lr = lr;
    a.lr_is_double = lr_is_double;
    a.grad_factor = grad_factor;
    a.found_inf = found_inf;
    a.options = {o[0], o[1], o[2], o[3], o[4], o[5], (flags & 2) != 0};
    a.zero_grads = flags & 4;
    a.seed = seed;
    a.factors = plan.rows.data();
    a.use(workspace.data(), plan);
    emulation::launch(grid, THREADS, [&] { adafactor_sums_kernel(a); });
    emulation::launch(grid, THREADS, [&] { adafactor_means_kernel(a); });
    emulation::launch(grid, THREADS, [&] { adafactor_divisors_kernel(a); });
    emulation::launch(grid, THREADS, [&] { adafactor_squares_kernel(a); });
    emulation::launch(grid, THREADS, [&] { adafactor_scales_kernel(a); });
    emulation::launch(grid, THREADS, [&] {
        flags & 8 ? adafactor_apply_kernel<true>(a) : adafactor_apply_kernel<false>(a);
    });
}

// The most bytes that any thread asked for before it stored or waited, since this was last called.
int64_t emulated_asked() { return emulation::most_asked(); }

void emulated_norm(unsigned grid, const int64_t* table, int rows, double* out) {
    static NormWorkspace workspace;
    const TableGradients gradients{table, rows};
    emulation::launch(grid, THREADS, [&] { norm_kernel(gradients, &workspace, out, false); });
}

// All tensors of one dtype, their rows as arguments of the launch.
void emulated_norm_of_list(unsigned grid, const void* const* addresses, const int64_t* numels,
                           int dtype, int count, double* out) {
    static NormWorkspace workspace;
    static ListedTensors rows;
    int64_t chunks = 0;
    rows.count = count;
    for (int r = 0; r < count; ++r) {
        rows.address[r] = addresses[r];
        rows.packed[r] = numels[r] * 4 + dtype;
        rows.first_chunk[r] = static_cast<int32_t>(chunks);
        chunks += (numels[r] + CHUNK - 1) / CHUNK;
    }
    emulation::launch(grid, THREADS, [&] { norm_kernel(rows, &workspace, out, false); });
}

// Dtype codes of math/optimizers/table.h; the packs are those that
// csrc/cuda/communication/reduce.cu chooses, or single elements.
void emulated_sum(unsigned grid, void* out, const void* const* addends, int count, int with_out,
                  double scale, int64_t numel, int dtype_out, int dtype_in, int head) {
    Rows rows{};
    rows.count = count;
    for (int r = 0; r < count; ++r) rows.data[r] = addends[r];
    const auto run = [&](auto to, auto from) {
        constexpr int OUT = decltype(to)::value, IN = decltype(from)::value;
        constexpr int N = 16 / (bytes_of(OUT) > bytes_of(IN) ? bytes_of(OUT) : bytes_of(IN));
        if (head < 0)
            sum<OUT, IN, 1>(grid, out, rows, with_out, scale, numel, 0);
        else
            sum<OUT, IN, N>(grid, out, rows, with_out, scale, numel, head);
    };
    if (dtype_out == FP64) return run(Code<FP64>{}, Code<FP64>{});
    with_dtype(dtype_out,
               [&](auto to) { with_dtype(dtype_in, [&](auto from) { run(to, from); }); });
}

// kind: 0 uniform, 1 normal, 2 dropout mask
void emulated_random(unsigned grid, int kind, void* out, int64_t numel, float p, uint64_t key,
                     int64_t offset, int64_t row, int64_t row_stride) {
    const StreamRange range{offset, row, row_stride};
    emulation::launch(grid, RANDOM_THREADS, [&] {
        if (kind == 0) random_kernel(static_cast<float*>(out), numel, Uniform{}, key, range);
        if (kind == 1) random_kernel(static_cast<float*>(out), numel, Normal{}, key, range);
        if (kind == 2) random_kernel(static_cast<uint8_t*>(out), numel, DropoutMask{p}, key, range);
    });
}

}  // extern "C"
