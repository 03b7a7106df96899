// Adam's step over a table, for the rules that become Adam in a special case.
#pragma once
#include "../../math/optimizers/adam.h"
#include "step.cuh"

namespace pyops::cuda {

void adam_rows(const Tensor& table, const AdamOptions& options, const StepContext& context,
               const Launch& on);

}  // namespace pyops::cuda
