// Adagrad on CUDA.
#include "../cpu/adagrad_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("adagrad_", TORCH_BOX(&pyops::AdagradOps<pyops::cuda::Cuda>::adagrad_));
  m.impl("adagrad_from_table_", TORCH_BOX(&pyops::AdagradOps<pyops::cuda::Cuda>::adagrad_from_table_));
}
