// squared_norm of a list of tensors or of a table's gradients, in one launch. The rows of a list
// travel as kernel arguments.
#include <algorithm>
#include <memory>
#include <vector>

#include "../../host/box.h"
#include "../../host/optimizers/table.h"
#include "grad_norm_kernel.cuh"
#include "../launch.cuh"

namespace pyops::cuda {
namespace {

using torch::headeronly::ScalarType;

// Memory of the caching allocator on the launch's device.
Tensor empty_on(const Launch& on, int64_t numel, ScalarType dtype) {
    const std::vector<int64_t> shape = {numel};
    return torch::stable::empty(
        shape, dtype, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, on.device));
}

class Norm {
public:
    explicit Norm(const Tensor& like)
        : on_(like), out_(empty_on(on_, 2, ScalarType::Double)),
          memory_(empty_on(on_, sizeof(NormWorkspace), ScalarType::Byte)) {
        workspace_ = static_cast<NormWorkspace*>(memory_.mutable_data_ptr());
        check(cudaMemsetAsync(&workspace_->ticket, 0, sizeof workspace_->ticket, on_.stream),
              "squared_norm");
    }

    template <typename Rows>
    void add(const Rows& rows) {
        norm_kernel<Rows><<<NORM_CTAS, THREADS, 0, on_.stream>>>(
            rows, workspace_, static_cast<double*>(out_.mutable_data_ptr()), more_);
        check_launch("squared_norm");
        more_ = true;
    }

    Tensor result() const { return out_; }

private:
    const Launch on_;
    Tensor out_, memory_;
    NormWorkspace* workspace_;
    bool more_ = false;
};

Tensor squared_norm(const Tensors tensors) {
    require(!tensors.empty(),
            "pyops::squared_norm: an empty list names no device; pass at least one tensor");
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& t = tensors[i];
        const int dtype = dtype_code(t);
        require(dtype >= 0 && dtype != FP64, "pyops::squared_norm: tensors[", i,
                "] must be float32, bfloat16 or float16; cast it");
        require(
            t.is_cuda() && t.get_device_index() == tensors[0].get_device_index(),
            "pyops::squared_norm: tensors[", i,
            "] is on another device than tensors[0]; take the norm of each device apart, and add");
        require(is_dense(t), "pyops::squared_norm: tensors[", i, "] has shape ", Shape{t},
                ": gaps or overlaps; pass a dense copy");
    }
    Norm norm(tensors[0]);
    const auto rows = std::make_unique<ListedTensors>();
    for (size_t done = 0; done < tensors.size(); done += MAX_ROWS) {
        rows->count = static_cast<int>(std::min<size_t>(tensors.size() - done, MAX_ROWS));
        int64_t chunks = 0;
        for (int r = 0; r < rows->count; ++r) {
            const Tensor& t = tensors[done + static_cast<size_t>(r)];
            rows->address[r] = t.const_data_ptr();
            rows->packed[r] = t.numel() * 4 + dtype_code(t);
            rows->first_chunk[r] = static_cast<int32_t>(chunks);
            chunks += (t.numel() + CHUNK - 1) / CHUNK;
        }
        norm.add(*rows);
    }
    return norm.result();
}

Tensor squared_norm_from_table(const Tensor table) {
    const int64_t rows = check_table(table, "squared_norm_from_table");
    require(rows > 0, "pyops::squared_norm_from_table: the table has no rows");
    Norm norm(table);
    norm.add(TableGradients{static_cast<const int64_t*>(table.const_data_ptr()),
                            static_cast<int>(rows)});
    return norm.result();
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "squared_norm", &pyops::cuda::squared_norm);
    PYOPS_IMPL(m, "squared_norm_from_table", &pyops::cuda::squared_norm_from_table);
}
