// Launches of the layer-wise optimizers: csrc/cuda/optimizers/layer_kernel.cuh.
#pragma once
#include "layer_kernel.cuh"
#include "step.cuh"

namespace pyops::cuda {

enum Passes : int64_t { FIRST_PASS = 1, SECOND_PASS = 2 };

// A table on the device and the launch that it lies on.
struct CudaRows {
    const Tensor& table;
    const Launch& on;
};

struct Workspace {
    Tensor memory;
    SquaredNorms* partial;
    Workspace(int64_t rows, const Launch& on)
        : memory(torch::stable::empty(
              std::vector<int64_t>{rows, SLICES, 2}, torch::headeronly::ScalarType::Double,
              std::nullopt, torch::stable::Device(torch::headeronly::DeviceType::CUDA, on.device))),
          partial(static_cast<SquaredNorms*>(memory.mutable_data_ptr())) {}
};

template <typename Options>
LayerArguments<Options> arguments_of(const CudaRows& rows, const Tensor& norms,
                                     const Options& options, const StepContext& context,
                                     int64_t passes, const char* op) {
    const int64_t n = rows.table.size(0);
    require(passes >= FIRST_PASS && passes <= (FIRST_PASS | SECOND_PASS), "pyops::", op,
            ": passes must be 1 (norms), 2 (apply) or 3 (both), got ", passes);
    require(dtype_code(norms) == FP64 && norms.dim() == 2 && norms.size(0) == n &&
                norms.size(1) == 2 && norms.is_contiguous() && norms.is_cuda() &&
                norms.get_device_index() == rows.on.device,
            "pyops::", op, ": norms must be a contiguous float64 [", n,
            ", 2] on the parameters' device, got shape ", Shape{norms});
    check_scalar(context.lr, "lr_tensor", true, true);
    require(!context.lr || context.lr->get_device_index() == rows.on.device,
            "pyops: lr_tensor is on another device than the parameters; move it");
    LayerArguments<Options> a{};
    a.table = static_cast<int64_t*>(rows.table.data_ptr());
    a.rows = static_cast<int>(n);
    a.lr = context.lr ? context.lr->const_data_ptr() : nullptr;
    a.lr_is_double = context.lr && dtype_code(*context.lr) == FP64;
    a.grad_factor = one_float(context.grad_factor, "grad_factor", rows.on);
    a.found_inf = one_float(context.found_inf, "found_inf", rows.on);
    a.options = options;
    a.seed = context.seed;
    a.norms = static_cast<SquaredNorms*>(norms.data_ptr());
    return a;
}

template <typename First, bool SR>
void first_pass(LayerArguments<typename First::Options> a, const CudaRows& rows) {
    const Workspace workspace(a.rows, rows.on);
    a.partial = workspace.partial;
    constexpr auto kernel = first_kernel<First, SR>;
    kernel<<<resident_ctas<kernel>(rows.on.device, THREADS), THREADS, 0, rows.on.stream>>>(a);
    check_launch("norms of layers");
    const int blocks = a.rows < 1024 ? a.rows : 1024;
    add_up_kernel<<<blocks, THREADS, 0, rows.on.stream>>>(a);
    check_launch("norms of layers");
}

template <template <typename> class R, typename Options>
void second_pass(const LayerArguments<Options>& a, const CudaRows& rows, bool zero_grads,
                 bool stochastic_rounding) {
    StepArguments<R> s{};
    s.table = a.table;
    s.rows = a.rows;
    s.zero_grads = zero_grads;
    s.seed = a.seed;
    const auto launch = [&](auto random) {
        constexpr auto kernel = second_kernel<R, decltype(random)::value, Options>;
        kernel<<<resident_ctas<kernel>(rows.on.device, THREADS), THREADS, 0, rows.on.stream>>>(a,
                                                                                               s);
        check_launch("step of layers");
    };
    if (stochastic_rounding)
        launch(std::true_type{});
    else
        launch(std::false_type{});
}

// What csrc/host/optimizers/lamb_ops.h and lars_ops.h call.
struct LayersOnCuda {
    template <typename F>
    static void with_lists(const TensorLists& lists, const std::vector<int64_t>& offsets,
                           unsigned required, const char* op, const F& f) {
        if (lists.params->empty()) return;
        const std::vector<int64_t> rows = make_table(lists, offsets, required, op);
        const Launch on((*lists.params)[0]);
        const Tensor table = upload(rows, on);
        f(CudaRows{table, on});
    }

    template <typename F>
    static void with_table(const Tensor& table, unsigned, const char* op, const F& f) {
        if (check_table(table, op) == 0) return;
        const Launch on(table);
        f(CudaRows{table, on});
    }

    static void lamb(const CudaRows& rows, const Tensor& norms, const LambOptions& options,
                     const StepContext& context, int64_t passes, const char* op);
    static void lars(const CudaRows& rows, const Tensor& norms, const LarsOptions& options,
                     const StepContext& context, int64_t passes, const char* op);
};

}  // namespace pyops::cuda
