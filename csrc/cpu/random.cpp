// Philox streams into tensors: a part of `out` is a few runs of consecutive global indices
// (pyops/ops/random.py).
#include "../host/box.h"
#include "kernels.h"
#include "calls/loop.h"
#include "../host/optimizers/table.h"

namespace pyops {
namespace {

struct StreamRange {
    int64_t offset, row, row_stride;
};

int64_t check_range(const Tensor& out, const StreamRange& range, bool boolean, const char* op) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(out.get(), &dtype));
    require(dtype == (boolean ? aoti_torch_dtype_bool() : aoti_torch_dtype_float32()) &&
                out.is_contiguous(),
            "pyops::", op, ": out must be a contiguous ", boolean ? "bool" : "float32",
            " tensor, got shape ", Shape{out});
    require(range.offset >= 0 && range.row >= 1 && range.row_stride >= 0, "pyops::", op,
            ": need offset >= 0, row >= 1, row_stride >= 0; got ", range.offset, ", ", range.row,
            ", ", range.row_stride);
    return out.numel();
}

// Calls f(position, count, global index) for every run of consecutive indices.
template <typename F>
void for_each_run(int64_t n, const StreamRange& range, F f) {
    for_each_part(n, [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t line = begin / range.row, column = begin % range.row;
            const bool seamless = range.row == range.row_stride;
            const int64_t count =
                seamless ? end - begin : std::min(end - begin, range.row - column);
            f(begin, count, static_cast<uint64_t>(range.offset + line * range.row_stride + column));
            begin += count;
        }
    });
}

void philox_uniform_(const Tensor out, int64_t key, int64_t offset, int64_t row,
                     int64_t row_stride) {
    const StreamRange range{offset, row, row_stride};
    const int64_t n = check_range(out, range, false, "philox_uniform_");
    float* const data = static_cast<float*>(out.data_ptr());
    const Kernels& kernel = kernels();
    for_each_run(n, range, [&](int64_t at, int64_t count, uint64_t index) {
        kernel.uniform(data + at, count, static_cast<uint64_t>(key), index);
    });
}

void philox_normal_(const Tensor out, int64_t key, int64_t offset, int64_t row,
                    int64_t row_stride) {
    const StreamRange range{offset, row, row_stride};
    const int64_t n = check_range(out, range, false, "philox_normal_");
    float* const data = static_cast<float*>(out.data_ptr());
    const Kernels& kernel = kernels();
    for_each_run(n, range, [&](int64_t at, int64_t count, uint64_t index) {
        kernel.normal(data + at, count, static_cast<uint64_t>(key), index);
    });
}

void philox_dropout_mask_(const Tensor out, double p, int64_t key, int64_t offset, int64_t row,
                          int64_t row_stride) {
    const StreamRange range{offset, row, row_stride};
    const int64_t n = check_range(out, range, true, "philox_dropout_mask_");
    require(p >= 0.0 && p <= 1.0,
            "pyops::philox_dropout_mask_: p must be a probability in [0, 1], got ", p);
    uint8_t* const data = static_cast<uint8_t*>(out.data_ptr());
    const Kernels& kernel = kernels();
    for_each_run(n, range, [&](int64_t at, int64_t count, uint64_t index) {
        kernel.dropout_mask(data + at, count, static_cast<float>(p), static_cast<uint64_t>(key),
                            index);
    });
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "philox_uniform_", &pyops::philox_uniform_);
    PYOPS_IMPL(m, "philox_normal_", &pyops::philox_normal_);
    PYOPS_IMPL(m, "philox_dropout_mask_", &pyops::philox_dropout_mask_);
}
