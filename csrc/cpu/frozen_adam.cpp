// Adam with a frozen variance, and its momentum, on the CPU.
#include "frozen_adam_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("frozen_adam_", TORCH_BOX(&pyops::FrozenAdamOps<pyops::Cpu>::frozen_adam_));
    m.impl("momentum_", TORCH_BOX(&pyops::FrozenAdamOps<pyops::Cpu>::momentum_));
}
