// Philox streams into CUDA tensors: uniform numbers, normal numbers, dropout masks.
#include "../host/box.h"
#include "../host/optimizers/table.h"
#include "launch.cuh"
#include "random_kernel.cuh"

namespace pyops::cuda {
namespace {

template <typename Draw>
void fill(const Tensor& out, Draw draw, int64_t key, const StreamRange& range, const char* op) {
    constexpr bool BOOLEAN = sizeof(typename Draw::type) == 1;
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(out.get(), &dtype));
    require(dtype == (BOOLEAN ? aoti_torch_dtype_bool() : aoti_torch_dtype_float32()) &&
                out.is_contiguous(),
            "pyops::", op, ": out must be a contiguous ", BOOLEAN ? "bool" : "float32",
            " tensor, got shape ", Shape{out});
    require(range.offset >= 0 && range.row >= 1 && range.row_stride >= 0, "pyops::", op,
            ": need offset >= 0, row >= 1, row_stride >= 0; got ", range.offset, ", ", range.row,
            ", ", range.row_stride);
    const int64_t numel = out.numel();
    if (numel == 0) return;
    const Launch on(out);
    constexpr auto kernel = random_kernel<Draw>;
    const int64_t ctas = (numel + 4 * RANDOM_THREADS - 1) / (4 * RANDOM_THREADS);
    kernel<<<grid_for<kernel>(ctas, on.device, RANDOM_THREADS), RANDOM_THREADS, 0, on.stream>>>(
        static_cast<typename Draw::type*>(out.mutable_data_ptr()), numel, draw,
        static_cast<uint64_t>(key), range);
    check_launch(op);
}

void philox_uniform_(const Tensor out, int64_t key, int64_t offset, int64_t row,
                     int64_t row_stride) {
    fill(out, Uniform{}, key, {offset, row, row_stride}, "philox_uniform_");
}

void philox_normal_(const Tensor out, int64_t key, int64_t offset, int64_t row,
                    int64_t row_stride) {
    fill(out, Normal{}, key, {offset, row, row_stride}, "philox_normal_");
}

void philox_dropout_mask_(const Tensor out, double p, int64_t key, int64_t offset, int64_t row,
                          int64_t row_stride) {
    require(p >= 0.0 && p <= 1.0,
            "pyops::philox_dropout_mask_: p must be a probability in [0, 1], got ", p);
    fill(out, DropoutMask{static_cast<float>(p)}, key, {offset, row, row_stride},
         "philox_dropout_mask_");
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "philox_uniform_", &pyops::cuda::philox_uniform_);
    PYOPS_IMPL(m, "philox_normal_", &pyops::cuda::philox_normal_);
    PYOPS_IMPL(m, "philox_dropout_mask_", &pyops::cuda::philox_dropout_mask_);
}
