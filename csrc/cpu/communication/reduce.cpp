// The arithmetic of collectives on tensors: checks, then parts of [0, n) on torch's threads.
#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/loop.h"
#include "../../host/optimizers/table.h"

namespace pyops {
namespace {

// The dtype code of an operand of `out`; throws when it does not go with it.
int check_operand(const Tensor& out, const Tensor& a, const char* op) {
    const int dtype_out = dtype_code(out), dtype = dtype_code(a);
    require(dtype >= 0 && dtype_out >= 0 && (dtype == FP64) == (dtype_out == FP64), "pyops::", op,
            ": dtypes must be of float32, bfloat16, float16, or all float64");
    require(a.is_cpu() && out.is_cpu(), "pyops::", op, ": operands are on different devices");
    require(a.numel() == out.numel() && a.is_contiguous() && out.is_contiguous(), "pyops::", op,
            ": operands must be contiguous and of one size, got ", Shape{out}, " and ", Shape{a});
    return dtype;
}

const void* moved(const void* base, int64_t elements, int dtype) {
    return static_cast<const char*>(base) + elements * (dtype == FP64 ? 8 : dtype == FP32 ? 4 : 2);
}
void* moved(void* base, int64_t elements, int dtype) {
    return const_cast<void*>(moved(const_cast<const void*>(base), elements, dtype));
}

void accumulate_(const Tensor out, const Tensor a, double scale) {
    const int in = check_operand(out, a, "accumulate_"), to = dtype_code(out);
    void* const target = out.data_ptr();
    const void* const source = a.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(out.numel(), [&](int64_t begin, int64_t end) {
        kernel.accumulate(moved(target, begin, to), moved(source, begin, in), end - begin, to, in,
                          scale);
    });
}

void scale_cast_(const Tensor out, const Tensor a, double scale) {
    const int in = check_operand(out, a, "scale_cast_"), to = dtype_code(out);
    void* const target = out.data_ptr();
    const void* const source = a.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(out.numel(), [&](int64_t begin, int64_t end) {
        kernel.scale_cast(moved(target, begin, to), moved(source, begin, in), end - begin, to, in,
                          scale);
    });
}

void sum_rows_(const Tensor out, const Tensors rows, double scale) {
    require(!rows.empty(), "pyops::sum_rows_: needs at least one row");
    const int in = dtype_code(rows[0]), to = dtype_code(out);
    std::vector<const void*> sources;
    for (const Tensor& row : rows) {
        require(check_operand(out, row, "sum_rows_") == in,
                "pyops::sum_rows_: rows must have one dtype");
        sources.push_back(row.data_ptr());
    }
    void* const target = out.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(out.numel(), [&](int64_t begin, int64_t end) {
        std::vector<const void*> here;
        for (const void* source : sources) here.push_back(moved(source, begin, in));
        kernel.sum_rows(moved(target, begin, to), here.data(), static_cast<int>(here.size()),
                        end - begin, to, in, scale);
    });
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "accumulate_", &pyops::accumulate_);
    PYOPS_IMPL(m, "sum_rows_", &pyops::sum_rows_);
    PYOPS_IMPL(m, "scale_cast_", &pyops::scale_cast_);
}
