// SGD on the CPU.
#include "../../host/box.h"
#include "../../host/optimizers/sgd_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "sgd_", &pyops::SgdOps<pyops::Cpu>::sgd_);
    PYOPS_IMPL(m, "sgd_from_table_", &pyops::SgdOps<pyops::Cpu>::sgd_from_table_);
}
