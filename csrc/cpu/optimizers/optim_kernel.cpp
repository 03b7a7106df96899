// Adam for each instruction set.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

void adam_kernel(const StepSpan& span, const Adam<float>& rule) {
    step_in_memory<Adam>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
