// Adam with a frozen variance, and the momentum before it. The order of the arguments is that of
// pyops/ops/optimizers/frozen_adam.py.
#pragma once
#include "../../math/optimizers/frozen_adam.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct FrozenAdamOps {
    static void frozen_adam_(const Tensors params, const Tensors exp_avgs,
                             const Tensors exp_avg_sqs, const Tensors masters, const Tensors copies,
                             const Scalar lr_tensor, const Scalar found_inf, double lr, double eps,
                             double weight_decay) {
        const TensorLists lists{&params, &NONE,    &exp_avgs, &exp_avg_sqs,
                                &NONE,   &masters, &copies,   &NONE};
        const StepContext context =
            step_context_of(lr_tensor, std::nullopt, found_inf, false, false, 0);
        Backend::template step<FrozenAdam>(lists, {}, {lr, eps, weight_decay}, context,
                                           "frozen_adam_");
    }

    static void momentum_(const Tensors exp_avgs, const Tensors grads, const Scalar grad_factor,
                          const Scalar found_inf, double beta, bool zero_grads) {
        const TensorLists lists{&exp_avgs, &grads, &NONE, &NONE, &NONE, &NONE, &NONE, &NONE};
        const StepContext context =
            step_context_of(std::nullopt, grad_factor, found_inf, zero_grads, false, 0);
        Backend::template step<Momentum>(lists, {}, {1.0 - beta}, context, "momentum_");
    }
};

}  // namespace pyops
