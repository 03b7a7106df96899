// LARS on CUDA.
#include "../../host/box.h"
#include "../../host/optimizers/lars_ops.h"
#include "layer.cuh"

namespace pyops::cuda {

void LayersOnCuda::lars(const CudaRows& rows, const Tensor& norms, const LarsOptions& o,
                        const StepContext& context, int64_t passes, const char* op) {
    const LayerArguments<LarsOptions> a = arguments_of(rows, norms, o, context, passes, op);
    if ((passes & FIRST_PASS) && o.trust_ratio) first_pass<LarsFirst, false>(a, rows);
    if ((passes & SECOND_PASS) == 0) return;
    if (o.sgd.momentum != 0.0)
        second_pass<MomentumSgd>(a, rows, context.zero_grads, context.stochastic_rounding);
    else
        second_pass<PlainSgd>(a, rows, context.zero_grads, context.stochastic_rounding);
}

}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "lars_", &pyops::LarsOps<pyops::cuda::LayersOnCuda>::lars_);
    PYOPS_IMPL(m, "lars_from_table_", &pyops::LarsOps<pyops::cuda::LayersOnCuda>::lars_from_table_);
}
