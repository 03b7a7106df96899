// A step of any elementwise rule over a list of tensors or over their table: one launch of a grid
// that stays, whatever the number of tensors.
//
// Nothing is allocated or copied but the table, which arrives as kernel arguments, and nothing is
// waited for: a CUDA graph can capture all of it.
#pragma once
#include <optional>
#include <vector>

#include "../../host/optimizers/unpack.h"
#include "../launch.cuh"
#include "step_kernel.cuh"
#include "../upload.cuh"

namespace pyops::cuda {

inline const float* one_float(const std::optional<Tensor>& scalar, const char* name,
                              const Launch& on) {
    check_scalar(scalar, name, true, false);
    require(!scalar || scalar->get_device_index() == on.device, "pyops: ", name,
            " is on another device than the parameters; move it");
    return scalar ? static_cast<const float*>(scalar->const_data_ptr()) : nullptr;
}

template <template <typename> class R, bool SR>
void launch(const StepArguments<R>& a, const Launch& on) {
    constexpr auto kernel = step_kernel<R, SR>;
    kernel<<<resident_ctas<kernel>(on.device, THREADS), THREADS, 0, on.stream>>>(a);
    check_launch("optimizer step");
}

template <template <typename> class R>
void step_rows(const Tensor& table, const typename R<float>::Options& options,
               const StepContext& context, const Launch& on) {
    StepArguments<R> a{};
    a.table = static_cast<int64_t*>(table.data_ptr());
    a.rows = static_cast<int>(table.size(0));
    check_scalar(context.lr, "lr_tensor", true, true);
    require(!context.lr || context.lr->get_device_index() == on.device,
            "pyops: lr_tensor is on another device than the parameters; move it");
    a.lr = context.lr ? context.lr->const_data_ptr() : nullptr;
    a.lr_is_double = context.lr && dtype_code(*context.lr) == FP64;
    a.grad_factor = one_float(context.grad_factor, "grad_factor", on);
    a.found_inf = one_float(context.found_inf, "found_inf", on);
    a.options = options;
    a.zero_grads = context.zero_grads;
    a.seed = context.seed;
    if constexpr (R<float>::COUNTS) {
        if (context.stochastic_rounding) return launch<R, true>(a, on);
    }
    launch<R, false>(a, on);
}

// What csrc/host/optimizers/unpack.h calls.
struct Cuda {
    template <template <typename> class R>
    static void step(const TensorLists& lists, const std::vector<int64_t>& offsets,
                     const typename R<float>::Options& options, const StepContext& context,
                     const char* op) {
        if (lists.params->empty()) return;
        const std::vector<int64_t> rows = make_table(lists, offsets, REQUIRED<R<float>>, op);
        const Launch on((*lists.params)[0]);
        step_rows<R>(upload(rows, on), options, context, on);
    }

    template <template <typename> class R>
    static void step_table(const Tensor& table, const typename R<float>::Options& options,
                           const StepContext& context, const char* op) {
        if (check_table(table, op) == 0) return;
        step_rows<R>(table, options, context, Launch(table));
    }
};

}  // namespace pyops::cuda
