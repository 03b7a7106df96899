// Adagrad for each instruction set.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

void adagrad_kernel(const StepSpan& span, const Adagrad<float>& rule) {
    step_in_memory<Adagrad>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
