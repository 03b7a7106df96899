// Lion for each instruction set.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

void lion_kernel(const StepSpan& span, const Lion<float>& rule) {
    step_in_memory<Lion>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
