// Adagrad. The order of the arguments is that of the schema in pyops/ops/optimizers/adagrad.py.
#pragma once
#include "../math/adagrad.h"
#include "unpack.h"

namespace pyops {

template <typename Backend>
struct AdagradOps {
    static void adagrad_(const Tensors params, const Tensors grads, const Tensors sums,
                         const Tensors masters, const Tensors copies, const Tensors steps,
                         const Scalar lr_tensor, const Scalar grad_factor, const Scalar found_inf,
                         double lr, double lr_decay, double weight_decay, double eps, bool maximize,
                         bool zero_grads, bool stochastic_rounding, int64_t seed,
                         const std::vector<int64_t> offsets) {
        const TensorLists lists{&params, &grads, &NONE, &sums, &NONE, &masters, &copies, &steps};
        const AdagradOptions options{lr, lr_decay, weight_decay, eps, maximize};
        const Around around =
            around_of(lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed);
        Backend::template step<Adagrad>(lists, offsets, options, around, "adagrad_");
    }

    static void adagrad_from_table_(const Tensor table, const Scalar lr_tensor,
                                    const Scalar grad_factor, const Scalar found_inf, double lr,
                                    double lr_decay, double weight_decay, double eps, bool maximize,
                                    bool zero_grads, bool stochastic_rounding, int64_t seed) {
        const AdagradOptions options{lr, lr_decay, weight_decay, eps, maximize};
        const Around around =
            around_of(lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed);
        Backend::template step_table<Adagrad>(table, options, around, "adagrad_from_table_");
    }
};

}  // namespace pyops
