// The local half of a collective: accumulate_, sum_rows_ and scale_cast_, all one kernel.
#include <type_traits>

#include "../../host/box.h"
#include "../../host/optimizers/table.h"
#include "../launch.cuh"
#include "reduce_kernel.cuh"

namespace pyops::cuda {
namespace {

template <int OUT, int IN, int N>
void launch(const Tensor& out, const Rows& rows, bool with_out, double scale, int head) {
    using Scalar = std::conditional_t<OUT == FP64, double, float>;
    const Launch on(out);
    const int64_t numel = out.numel();
    constexpr auto kernel = sum_kernel<OUT, IN, N, Scalar>;
    const unsigned grid = grid_for<kernel>((numel + CHUNK - 1) / CHUNK, on.device, SUM_THREADS);
    kernel<<<grid, SUM_THREADS, 0, on.stream>>>(out.mutable_data_ptr(), rows, with_out,
                                                static_cast<Scalar>(scale), numel, head);
    check_launch("sum of rows");
}

template <int OUT, int IN>
void in_line(const Tensor& out, const Rows& rows, bool with_out, double scale) {
    constexpr int WIDEST = bytes_of(OUT) > bytes_of(IN) ? bytes_of(OUT) : bytes_of(IN);
    constexpr int N = 16 / WIDEST;
    int misaligned = misalignment(out.mutable_data_ptr(), bytes_of(OUT), N);
    for (int r = 0; r < rows.count; ++r)
        misaligned = shared_misalignment(misaligned, rows.data[r], bytes_of(IN), N);
    if (misaligned < 0) return launch<OUT, IN, 1>(out, rows, with_out, scale, 0);
    launch<OUT, IN, N>(out, rows, with_out, scale, head_of(misaligned, N));
}

template <int OUT>
void for_input(int dtype_in, const Tensor& out, const Rows& rows, bool with_out, double scale) {
    if constexpr (OUT == FP64) {
        in_line<FP64, FP64>(out, rows, with_out, scale);
    } else {
        if (dtype_in == FP32) return in_line<OUT, FP32>(out, rows, with_out, scale);
        if (dtype_in == BF16) return in_line<OUT, BF16>(out, rows, with_out, scale);
        in_line<OUT, FP16>(out, rows, with_out, scale);
    }
}

// The dtype code of an addend of `out`; throws when it does not go with it.
int check_operand(const Tensor& out, const Tensor& a, const char* op) {
    const int dtype_out = dtype_code(out), dtype = dtype_code(a);
    require(dtype >= 0 && dtype_out >= 0 && (dtype == FP64) == (dtype_out == FP64), "pyops::", op,
            ": dtypes must be of float32, bfloat16, float16, or all float64");
    require(a.is_cuda() && out.is_cuda() && a.get_device_index() == out.get_device_index(),
            "pyops::", op, ": operands are on different devices");
    require(a.numel() == out.numel() && a.is_contiguous() && out.is_contiguous(), "pyops::", op,
            ": operands must be contiguous and of one size, got ", Shape{out}, " and ", Shape{a});
    return dtype;
}

void run(const Tensor& out, const Tensors& addends, bool with_out, double scale, const char* op) {
    require(!addends.empty(), "pyops::", op, ": needs at least one row");
    require(addends.size() <= MAX_ADDENDS, "pyops::", op, ": takes at most ", MAX_ADDENDS,
            " rows on CUDA, got ", addends.size());
    const int in = dtype_code(addends[0]);
    Rows rows{};
    for (const Tensor& a : addends) {
        require(check_operand(out, a, op) == in, "pyops::", op, ": rows must have one dtype");
        rows.data[rows.count++] = a.const_data_ptr();
    }
    if (out.numel() == 0) return;
    switch (dtype_code(out)) {
        case FP32: return for_input<FP32>(in, out, rows, with_out, scale);
        case BF16: return for_input<BF16>(in, out, rows, with_out, scale);
        case FP16: return for_input<FP16>(in, out, rows, with_out, scale);
        default: return for_input<FP64>(in, out, rows, with_out, scale);
    }
}

void accumulate_(const Tensor out, const Tensor a, double scale) {
    run(out, {a}, true, scale, "accumulate_");
}
void sum_rows_(const Tensor out, const Tensors rows, double scale) {
    run(out, rows, false, scale, "sum_rows_");
}
void scale_cast_(const Tensor out, const Tensor a, double scale) {
    run(out, {a}, false, scale, "scale_cast_");
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "accumulate_", &pyops::cuda::accumulate_);
    PYOPS_IMPL(m, "sum_rows_", &pyops::cuda::sum_rows_);
    PYOPS_IMPL(m, "scale_cast_", &pyops::cuda::scale_cast_);
}
