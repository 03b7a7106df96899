// Adam with a frozen variance, and the momentum before it, for each instruction set.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

void frozen_adam_kernel(const StepSpan& span, const FrozenAdam<float>& rule) {
    step_in_memory<FrozenAdam>(span, rule);
}
void momentum_kernel(const StepSpan& span, const Momentum<float>& rule) {
    step_in_memory<Momentum>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
