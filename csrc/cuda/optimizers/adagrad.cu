// Adagrad on CUDA.
#include "../../host/optimizers/adagrad_ops.h"
#include "../../host/box.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "adagrad_", &pyops::AdagradOps<pyops::cuda::Cuda>::step_);
    PYOPS_IMPL(m, "adagrad_from_table_", &pyops::AdagradOps<pyops::cuda::Cuda>::step_from_table_);
}
