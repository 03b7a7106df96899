// Adam on the CPU.
#include "../../host/box.h"
#include "../../host/optimizers/optim_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "adam_", &pyops::AdamOps<pyops::Cpu>::adam_);
    PYOPS_IMPL(m, "adam_from_table_", &pyops::AdamOps<pyops::Cpu>::adam_from_table_);
}
