// Adam and AdamW. The order of the arguments is that of the schema in
// pyops/ops/optimizers/optim.py.
#pragma once
#include "../../math/optimizers/adam.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct AdamOps {
    static void adam_(const Tensors params, const Tensors grads, const Tensors exp_avgs,
                      const Tensors exp_avg_sqs, const Tensors max_exp_avg_sqs,
                      const Tensors masters, const Tensors copies, const Tensors steps,
                      const Scalar lr_tensor, const Scalar grad_factor, const Scalar found_inf,
                      double lr, double beta1, double beta2, double eps, double weight_decay,
                      bool decoupled, bool maximize, bool zero_grads, bool stochastic_rounding,
                      int64_t seed, const std::vector<int64_t> offsets) {
        const TensorLists lists{&params,          &grads,   &exp_avgs, &exp_avg_sqs,
                                &max_exp_avg_sqs, &masters, &copies,   &steps};
        const AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::template step<Adam>(lists, offsets, options, context, "adam_");
    }

    static void adam_from_table_(const Tensor table, const Scalar lr_tensor,
                                 const Scalar grad_factor, const Scalar found_inf, double lr,
                                 double beta1, double beta2, double eps, double weight_decay,
                                 bool decoupled, bool maximize, bool zero_grads,
                                 bool stochastic_rounding, int64_t seed) {
        const AdamOptions options{lr, beta1, beta2, eps, weight_decay, decoupled, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::template step_table<Adam>(table, options, context, "adam_from_table_");
    }
};

}  // namespace pyops
