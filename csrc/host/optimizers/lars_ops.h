// LARS's ops, for both devices. The order of the arguments is that of the schema in
// pyops/ops/optimizers/lars.py.
#pragma once
#include "../../math/optimizers/lars.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct LarsOps {
    static unsigned columns(double momentum) {
        return momentum != 0.0 ? OF_ANY_RULE | set_of(EXP_AVG) : OF_ANY_RULE;
    }

    static void lars_(const Tensors params, const Tensors grads, const Tensors momentum_buffers,
                      const Tensors masters, const Tensors copies, const Tensors steps,
                      const Tensor norms, const Scalar lr_tensor, const Scalar grad_factor,
                      const Scalar found_inf, double lr, double momentum, double dampening,
                      double weight_decay, double trust_coefficient, double eps, bool nesterov,
                      bool trust_ratio, bool maximize, int64_t passes, bool zero_grads,
                      bool stochastic_rounding, int64_t seed, const std::vector<int64_t> offsets) {
        const TensorLists lists{&params, &grads,   &momentum_buffers, &NONE,
                                &NONE,   &masters, &copies,           &steps};
        const LarsOptions options{{lr, momentum, dampening, weight_decay, nesterov, maximize},
                                  trust_coefficient,
                                  eps,
                                  trust_ratio};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::with_lists(lists, offsets, columns(momentum), "lars_", [&](const auto& rows) {
            Backend::lars(rows, norms, options, context, passes, "lars_");
        });
    }

    static void lars_from_table_(const Tensor table, const Tensor norms, const Scalar lr_tensor,
                                 const Scalar grad_factor, const Scalar found_inf, double lr,
                                 double momentum, double dampening, double weight_decay,
                                 double trust_coefficient, double eps, bool nesterov,
                                 bool trust_ratio, bool maximize, int64_t passes, bool zero_grads,
                                 bool stochastic_rounding, int64_t seed) {
        const LarsOptions options{{lr, momentum, dampening, weight_decay, nesterov, maximize},
                                  trust_coefficient,
                                  eps,
                                  trust_ratio};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::with_table(table, columns(momentum), "lars_from_table_", [&](const auto& rows) {
            Backend::lars(rows, norms, options, context, passes, "lars_from_table_");
        });
    }
};

}  // namespace pyops
