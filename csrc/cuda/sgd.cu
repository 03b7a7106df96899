// SGD on CUDA.
#include "../cpu/sgd_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("sgd_", TORCH_BOX(&pyops::SgdOps<pyops::cuda::Cuda>::sgd_));
  m.impl("sgd_from_table_", TORCH_BOX(&pyops::SgdOps<pyops::cuda::Cuda>::sgd_from_table_));
}
