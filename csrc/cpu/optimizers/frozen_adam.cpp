// Adam with a frozen variance, and its momentum, on the CPU.
#include "../../host/box.h"
#include "../../host/optimizers/frozen_adam_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "frozen_adam_", &pyops::FrozenAdamOps<pyops::Cpu>::frozen_adam_);
    PYOPS_IMPL(m, "momentum_", &pyops::FrozenAdamOps<pyops::Cpu>::momentum_);
}
