// LAMB on CUDA.
#include "../../host/box.h"
#include "../../host/optimizers/lamb_ops.h"
#include "layer.cuh"
#include "optim.cuh"

namespace pyops::cuda {

void LayersOnCuda::lamb(const CudaRows& rows, const Tensor& norms, const LambOptions& o,
                        const StepContext& context, int64_t passes, const char* op) {
    LayerArguments<LambOptions> a = arguments_of(rows, norms, o, context, passes, op);
    if (!o.trust_ratio) {  // AdamW, in the last pass
        const AdamOptions adam{o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, true, o.maximize};
        if (passes & SECOND_PASS) adam_rows(rows.table, adam, context, rows.on);
        return;
    }
    if (passes & FIRST_PASS) {
        a.zero_grads = context.zero_grads;
        if (context.stochastic_rounding)
            first_pass<LambFirst, true>(a, rows);
        else
            first_pass<LambFirst, false>(a, rows);
    }
    if (passes & SECOND_PASS) second_pass<LambApply>(a, rows, false, context.stochastic_rounding);
}

}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "lamb_", &pyops::LambOps<pyops::cuda::LayersOnCuda>::lamb_);
    PYOPS_IMPL(m, "lamb_from_table_", &pyops::LambOps<pyops::cuda::LayersOnCuda>::lamb_from_table_);
}
