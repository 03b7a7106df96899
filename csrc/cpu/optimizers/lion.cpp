// Lion on the CPU.
#include "../../host/box.h"
#include "../../host/optimizers/lion_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "lion_", &pyops::LionOps<pyops::Cpu>::step_);
    PYOPS_IMPL(m, "lion_from_table_", &pyops::LionOps<pyops::Cpu>::step_from_table_);
}
