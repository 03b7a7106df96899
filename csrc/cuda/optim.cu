// Adam on CUDA.
#include "../cpu/optim_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("adam_", TORCH_BOX(&pyops::AdamOps<pyops::cuda::Cuda>::adam_));
  m.impl("adam_from_table_", TORCH_BOX(&pyops::AdamOps<pyops::cuda::Cuda>::adam_from_table_));
}
