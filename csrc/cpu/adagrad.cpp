// Adagrad on the CPU.
#include "adagrad_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("adagrad_", TORCH_BOX(&pyops::AdagradOps<pyops::Cpu>::adagrad_));
    m.impl("adagrad_from_table_", TORCH_BOX(&pyops::AdagradOps<pyops::Cpu>::adagrad_from_table_));
}
