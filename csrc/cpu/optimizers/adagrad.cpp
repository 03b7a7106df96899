// Adagrad on the CPU.
#include "../../host/optimizers/adagrad_ops.h"
#include "../../host/box.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "adagrad_", &pyops::AdagradOps<pyops::Cpu>::step_);
    PYOPS_IMPL(m, "adagrad_from_table_", &pyops::AdagradOps<pyops::Cpu>::step_from_table_);
}
