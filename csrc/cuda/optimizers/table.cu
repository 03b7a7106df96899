// The optimizer's table in device memory.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../../host/box.h"
#include "../../host/optimizers/table.h"
#include "table.cuh"
#include "../upload.cuh"

namespace pyops::cuda {
namespace {

// Rows travel as kernel arguments: no pinned memory to keep alive, and a CUDA graph holds them by
// value.
constexpr int ROWS_PER_LAUNCH = 300;

struct RowsByValue {
    int64_t number[ROWS_PER_LAUNCH * COLUMNS];
};

__global__ void write_table_kernel(int64_t* table, const __grid_constant__ RowsByValue rows,
                                   int count) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        table[i] = rows.number[i];
}

}  // namespace

Tensor upload(const std::vector<int64_t>& rows, const Launch& on) {
    const std::vector<int64_t> shape = {static_cast<int64_t>(rows.size()) / COLUMNS, COLUMNS};
    const torch::stable::Device device(torch::headeronly::DeviceType::CUDA, on.device);
    Tensor table =
        torch::stable::empty(shape, torch::headeronly::ScalarType::Long, std::nullopt, device);
    auto* to = static_cast<int64_t*>(table.mutable_data_ptr());
    RowsByValue some;
    for (size_t done = 0; done < rows.size(); done += ROWS_PER_LAUNCH * COLUMNS) {
        const size_t count = std::min<size_t>(rows.size() - done, ROWS_PER_LAUNCH * COLUMNS);
        std::memcpy(some.number, rows.data() + done, count * sizeof(int64_t));
        write_table_kernel<<<4, THREADS, 0, on.stream>>>(to + done, some, static_cast<int>(count));
        check_launch("optimizer_table");
    }
    return table;
}

namespace {

Tensor optimizer_table(const Tensors params, const Tensors grads, const Tensors exp_avgs,
                       const Tensors exp_avg_sqs, const Tensors max_exp_avg_sqs,
                       const Tensors masters, const Tensors copies, const Tensors steps,
                       const std::vector<int64_t> offsets) {
    require(!params.empty(),
            "pyops::optimizer_table: no parameters; a table of none belongs to no device");
    const std::vector<int64_t> rows = make_table(
        {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &masters, &copies, &steps},
        offsets, OF_ANY_RULE, "optimizer_table");
    return upload(rows, Launch(params[0]));
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "optimizer_table", &pyops::cuda::optimizer_table);
    m.impl("gradients_fit", TORCH_BOX(&pyops::gradients_fit));
}
