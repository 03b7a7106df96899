// The elementwise optimizers' ops: from a schema's arguments to a rule, its options and the lists
// of its columns. Written once for both devices; Backend::step and step_table do the work
// (csrc/cpu/optimizers/step.h, csrc/cuda/optimizers/step.cuh).
#pragma once
#include "table.h"

namespace pyops {

using Scalar = std::optional<Tensor>;

// What surrounds the rule in a step.
struct StepContext {
    Scalar lr, grad_factor, found_inf;
    bool zero_grads = false, stochastic_rounding = false;
    uint64_t seed = 0;
};

inline StepContext step_context_of(const Scalar& lr, const Scalar& grad_factor,
                                   const Scalar& found_inf, bool zero_grads,
                                   bool stochastic_rounding, int64_t seed) {
    return {lr,         grad_factor,         found_inf,
            zero_grads, stochastic_rounding, static_cast<uint64_t>(seed)};
}

inline const Tensors NONE;  // a list that an op does not have

}  // namespace pyops
