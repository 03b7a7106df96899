// Putting the rows of a table on the device: csrc/cuda/optimizers/table.cu.
#pragma once
#include <cstdint>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "launch.cuh"

namespace pyops::cuda {

// `rows` of COLUMNS numbers as an int64 tensor on the launch's device, without waiting for it.
torch::stable::Tensor upload(const std::vector<int64_t>& rows, const Launch& on);

}  // namespace pyops::cuda
