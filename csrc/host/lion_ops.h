// Lion. The order of the arguments is that of the schema in pyops/ops/optimizers/lion.py.
#pragma once
#include "../math/lion.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct LionOps {
    static void lion_(const Tensors params, const Tensors grads, const Tensors exp_avgs,
                      const Tensors masters, const Tensors copies, const Tensors steps,
                      const Scalar lr_tensor, const Scalar grad_factor, const Scalar found_inf,
                      double lr, double beta1, double beta2, double weight_decay, bool maximize,
                      bool zero_grads, bool stochastic_rounding, int64_t seed,
                      const std::vector<int64_t> offsets) {
        const TensorLists lists{&params, &grads,   &exp_avgs, &NONE,
                                &NONE,   &masters, &copies,   &steps};
        const LionOptions options{lr, beta1, beta2, weight_decay, maximize};
        const Around around =
            around_of(lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed);
        Backend::template step<Lion>(lists, offsets, options, around, "lion_");
    }

    static void lion_from_table_(const Tensor table, const Scalar lr_tensor,
                                 const Scalar grad_factor, const Scalar found_inf, double lr,
                                 double beta1, double beta2, double weight_decay, bool maximize,
                                 bool zero_grads, bool stochastic_rounding, int64_t seed) {
        const LionOptions options{lr, beta1, beta2, weight_decay, maximize};
        const Around around =
            around_of(lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed);
        Backend::template step_table<Lion>(table, options, around, "lion_from_table_");
    }
};

}  // namespace pyops
