// Adam on the CPU.
#include "optim_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("adam_", TORCH_BOX(&pyops::AdamOps<pyops::Cpu>::adam_));
    m.impl("adam_from_table_", TORCH_BOX(&pyops::AdamOps<pyops::Cpu>::adam_from_table_));
}
