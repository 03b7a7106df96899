// A sparse matrix, given by its rows, times a dense one: checks, then rows on torch's threads.
#include <algorithm>

#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

using torch::headeronly::ScalarType;

// Starts that rise from 0 to the number of values, and columns that x has: what is read lies
// within.
void check_structure(const CsrSpan& span, int64_t rows, int64_t values, int64_t inputs) {
    require(span.starts[0] == 0 && span.starts[rows] == values,
            "pyops::csr_product: starts must go from 0 to the number of values, ", values, "; got ",
            span.starts[0], " to ", span.starts[rows]);
    for (int64_t row = 0; row < rows; ++row)
        require(span.starts[row] <= span.starts[row + 1],
                "pyops::csr_product: starts must rise; got ", span.starts[row], " and then ",
                span.starts[row + 1], " at row ", row);
    uint32_t largest = 0;
    for (int64_t i = 0; i < values; ++i)
        largest = std::max(largest, static_cast<uint32_t>(span.columns[i]));
    require(values == 0 || largest < static_cast<uint64_t>(inputs),
            "pyops::csr_product: columns must be 0 to ", inputs - 1, ", as x has ", inputs,
            " rows; got ", static_cast<int32_t>(largest));
}

Tensor csr_product(const Tensor starts, const Tensor columns, const Tensor values, const Tensor x) {
    const int dtype = dtype_code(x);
    require(
        x.is_cpu() && (dtype == FP32 || dtype == FP64) && x.dim() == 2,
        "pyops::csr_product: x must be float32 or float64 [inputs, width] on the CPU, got shape ",
        Shape{x});
    require(starts.is_cpu() && starts.scalar_type() == ScalarType::Long && starts.dim() == 1 &&
                starts.numel() >= 1,
            "pyops::csr_product: starts must be int64 [rows + 1], got shape ", Shape{starts});
    require(columns.is_cpu() && columns.scalar_type() == ScalarType::Int && columns.dim() == 1 &&
                values.is_cpu() && dtype_code(values) == dtype && values.dim() == 1 &&
                values.numel() == columns.numel(),
            "pyops::csr_product: columns must be int32 and values of x's dtype, one for each "
            "nonzero, got shapes ",
            Shape{columns}, " and ", Shape{values});
    const Tensor from = dense(starts), places = dense(columns), numbers = dense(values);
    const Tensor right = dense(x);
    const int64_t rows = starts.numel() - 1, width = x.sizes()[1];
    const std::vector<int64_t> shape = {rows, width};
    Tensor out = in_huge_pages(torch::stable::new_empty(x, shape));
    CsrSpan span{static_cast<const int64_t*>(from.data_ptr()),
                 static_cast<const int32_t*>(places.data_ptr()),
                 numbers.data_ptr(),
                 right.data_ptr(),
                 out.data_ptr(),
                 width,
                 dtype == FP64};
    check_structure(span, rows, values.numel(), x.sizes()[0]);
    if (out.numel() == 0) return out;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) { kernel.csr_product(span, first, last); };
    if (values.numel() * width <= SERIAL)
        run(0, rows);
    else
        torch::stable::parallel_for(0, rows, 1, run);
    return out;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "csr_product", &pyops::csr_product); }
