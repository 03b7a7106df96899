// Adam with a frozen variance, and its momentum, on CUDA.
#include "../cpu/frozen_adam_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("frozen_adam_", TORCH_BOX(&pyops::FrozenAdamOps<pyops::cuda::Cuda>::frozen_adam_));
  m.impl("momentum_", TORCH_BOX(&pyops::FrozenAdamOps<pyops::cuda::Cuda>::momentum_));
}
