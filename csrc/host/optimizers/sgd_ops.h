// SGD, with and without momentum. The order of the arguments is that of the schema in
// pyops/ops/optimizers/sgd.py.
#pragma once
#include "../../math/optimizers/sgd.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct SgdOps {
    static void sgd_(const Tensors params, const Tensors grads, const Tensors momentum_buffers,
                     const Tensors masters, const Tensors copies, const Tensors steps,
                     const Scalar lr_tensor, const Scalar grad_factor, const Scalar found_inf,
                     double lr, double momentum, double dampening, double weight_decay,
                     bool nesterov, bool maximize, bool zero_grads, bool stochastic_rounding,
                     int64_t seed, const std::vector<int64_t> offsets) {
        const TensorLists lists{&params, &grads,   &momentum_buffers, &NONE,
                                &NONE,   &masters, &copies,           &steps};
        const SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        if (momentum != 0.0) {
            Backend::template step<MomentumSgd>(lists, offsets, options, context, "sgd_");
        } else {
            Backend::template step<PlainSgd>(lists, offsets, options, context, "sgd_");
        }
    }

    static void sgd_from_table_(const Tensor table, const Scalar lr_tensor,
                                const Scalar grad_factor, const Scalar found_inf, double lr,
                                double momentum, double dampening, double weight_decay,
                                bool nesterov, bool maximize, bool zero_grads,
                                bool stochastic_rounding, int64_t seed) {
        const SgdOptions options{lr, momentum, dampening, weight_decay, nesterov, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        if (momentum != 0.0) {
            Backend::template step_table<MomentumSgd>(table, options, context, "sgd_from_table_");
        } else {
            Backend::template step_table<PlainSgd>(table, options, context, "sgd_from_table_");
        }
    }
};

}  // namespace pyops
