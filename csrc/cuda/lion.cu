// Lion on CUDA.
#include "../cpu/lion_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("lion_", TORCH_BOX(&pyops::LionOps<pyops::cuda::Cuda>::lion_));
  m.impl("lion_from_table_", TORCH_BOX(&pyops::LionOps<pyops::cuda::Cuda>::lion_from_table_));
}
