// LAMB's ops, for both devices. The order of the arguments is that of the schema in
// pyops/ops/optimizers/lamb.py.
#pragma once
#include "../../math/optimizers/lamb.h"
#include "unpack.h"

namespace pyops {

constexpr unsigned LAMB_COLUMNS = OF_ANY_RULE | set_of(EXP_AVG, EXP_AVG_SQ);

template <typename Backend>
struct LambOps {
    static void lamb_(const Tensors params, const Tensors grads, const Tensors exp_avgs,
                      const Tensors exp_avg_sqs, const Tensors masters, const Tensors copies,
                      const Tensors steps, const Tensor norms, const Scalar lr_tensor,
                      const Scalar grad_factor, const Scalar found_inf, double lr, double beta1,
                      double beta2, double eps, double weight_decay, double min_ratio,
                      double max_ratio, bool trust_ratio, bool maximize, int64_t passes,
                      bool zero_grads, bool stochastic_rounding, int64_t seed,
                      const std::vector<int64_t> offsets) {
        const TensorLists lists{&params, &grads,   &exp_avgs, &exp_avg_sqs,
                                &NONE,   &masters, &copies,   &steps};
        const LambOptions options{lr,        beta1,     beta2,       eps,     weight_decay,
                                  min_ratio, max_ratio, trust_ratio, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::with_lists(lists, offsets, LAMB_COLUMNS, "lamb_", [&](const auto& rows) {
            Backend::lamb(rows, norms, options, context, passes, "lamb_");
        });
    }

    static void lamb_from_table_(const Tensor table, const Tensor norms, const Scalar lr_tensor,
                                 const Scalar grad_factor, const Scalar found_inf, double lr,
                                 double beta1, double beta2, double eps, double weight_decay,
                                 double min_ratio, double max_ratio, bool trust_ratio,
                                 bool maximize, int64_t passes, bool zero_grads,
                                 bool stochastic_rounding, int64_t seed) {
        const LambOptions options{lr,        beta1,     beta2,       eps,     weight_decay,
                                  min_ratio, max_ratio, trust_ratio, maximize};
        const StepContext context = step_context_of(lr_tensor, grad_factor, found_inf, zero_grads,
                                                    stochastic_rounding, seed);
        Backend::with_table(table, LAMB_COLUMNS, "lamb_from_table_", [&](const auto& rows) {
            Backend::lamb(rows, norms, options, context, passes, "lamb_from_table_");
        });
    }
};

}  // namespace pyops
