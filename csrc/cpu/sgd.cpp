// SGD on the CPU.
#include "sgd_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("sgd_", TORCH_BOX(&pyops::SgdOps<pyops::Cpu>::sgd_));
    m.impl("sgd_from_table_", TORCH_BOX(&pyops::SgdOps<pyops::Cpu>::sgd_from_table_));
}
