// Ops of the optimizers that keep one state and take four numbers: Adagrad and Lion. Which number
// means what, its rule's Options say; the order is that of the schemas in pyops/ops/optimizers.
#pragma once
#include "unpack.h"

namespace pyops {

// STATE: the column of the state, EXP_AVG or EXP_AVG_SQ. STEP, FROM_TABLE: the ops' names, for
// messages.
template <typename Backend, template <typename> class R, int STATE, const char* STEP,
          const char* FROM_TABLE>
struct OneStateOps {
    using Options = typename R<float>::Options;

    static void step_(const Tensors params, const Tensors grads, const Tensors states,
                      const Tensors masters, const Tensors copies, const Tensors steps,
                      const Scalar lr_tensor, const Scalar grad_factor, const Scalar found_inf,
                      double lr, double second, double third, double fourth, bool maximize,
                      bool zero_grads, bool stochastic_rounding, int64_t seed,
                      const std::vector<int64_t> offsets) {
        const Tensors& first_moments = STATE == EXP_AVG ? states : NONE;
        const Tensors& second_moments = STATE == EXP_AVG_SQ ? states : NONE;
        const TensorLists lists{&params, &grads,   &first_moments, &second_moments,
                                &NONE,   &masters, &copies,        &steps};
        const Options options{lr, second, third, fourth, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::template step<R>(lists, offsets, options, context, STEP);
    }

    static void step_from_table_(const Tensor table, const Scalar lr_tensor,
                                 const Scalar grad_factor, const Scalar found_inf, double lr,
                                 double second, double third, double fourth, bool maximize,
                                 bool zero_grads, bool stochastic_rounding, int64_t seed) {
        const Options options{lr, second, third, fourth, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::template step_table<R>(table, options, context, FROM_TABLE);
    }
};

}  // namespace pyops
