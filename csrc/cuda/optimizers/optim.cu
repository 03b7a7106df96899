// Adam on CUDA.
#include "../../host/box.h"
#include "optim.cuh"

#include "../../host/optimizers/optim_ops.h"

namespace pyops::cuda {

void adam_rows(const Tensor& table, const AdamOptions& options, const StepContext& context,
               const Launch& on) {
    step_rows<Adam>(table, options, context, on);
}

}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "adam_", &pyops::AdamOps<pyops::cuda::Cuda>::adam_);
    PYOPS_IMPL(m, "adam_from_table_", &pyops::AdamOps<pyops::cuda::Cuda>::adam_from_table_);
}
