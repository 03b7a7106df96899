// Lion on CUDA.
#include "../../host/box.h"
#include "../../host/optimizers/lion_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "lion_", &pyops::LionOps<pyops::cuda::Cuda>::step_);
    PYOPS_IMPL(m, "lion_from_table_", &pyops::LionOps<pyops::cuda::Cuda>::step_from_table_);
}
