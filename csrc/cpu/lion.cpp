// Lion on the CPU.
#include "lion_ops.h"
#include "step.h"

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("lion_", TORCH_BOX(&pyops::LionOps<pyops::Cpu>::lion_));
    m.impl("lion_from_table_", TORCH_BOX(&pyops::LionOps<pyops::Cpu>::lion_from_table_));
}
