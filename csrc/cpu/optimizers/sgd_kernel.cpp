// SGD, with and without momentum, for each instruction set.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

void plain_sgd_kernel(const StepSpan& span, const PlainSgd<float>& rule) {
    step_in_memory<PlainSgd>(span, rule);
}
void momentum_sgd_kernel(const StepSpan& span, const MomentumSgd<float>& rule) {
    step_in_memory<MomentumSgd>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
