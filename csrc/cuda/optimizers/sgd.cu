// SGD on CUDA.
#include "../../host/box.h"
#include "../../host/optimizers/sgd_ops.h"
#include "step.cuh"

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "sgd_", &pyops::SgdOps<pyops::cuda::Cuda>::sgd_);
    PYOPS_IMPL(m, "sgd_from_table_", &pyops::SgdOps<pyops::cuda::Cuda>::sgd_from_table_);
}
