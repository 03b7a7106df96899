// Adam with a frozen variance, and its momentum, on CUDA.
#include "../../host/box.h"
#include "../../host/optimizers/frozen_adam_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "frozen_adam_", &pyops::FrozenAdamOps<pyops::cuda::Cuda>::frozen_adam_);
    PYOPS_IMPL(m, "momentum_", &pyops::FrozenAdamOps<pyops::cuda::Cuda>::momentum_);
}
