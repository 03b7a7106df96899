// Cross entropy on tensors: checks, then blocks of rows dealt out to torch's threads in turn,
// because rows that are ignored cost nothing and often stand together.
#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

constexpr int64_t BLOCK = 4;  // rows

int32_t dtype_of(const Tensor& tensor) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

struct Words {
    int64_t ignore_index, first_column, columns;
};

LogitRows check_rows(const Tensor& logits, const Tensor& targets, const Words& words,
                     const char* op) {
    const int dtype = dtype_code(logits);
    require(dtype >= 0 && logits.dim() == 2 && (logits.size(1) <= 1 || logits.stride(1) == 1),
            "pyops::", op,
            ": logits must be float32, float64, bfloat16 or float16 [rows, columns] with adjacent "
            "columns, got ",
            Shape{logits});
    require(dtype_of(targets) == aoti_torch_dtype_int64() && targets.dim() == 1 &&
                targets.is_contiguous() && targets.size(0) == logits.size(0) && targets.is_cpu(),
            "pyops::", op, ": targets must be int64, contiguous, one for each row of the logits ",
            Shape{logits}, ", got ", Shape{targets});
    require(words.first_column >= 0 && words.columns >= 0 && words.columns <= logits.size(1),
            "pyops::", op, ": need first_column >= 0 and 0 <= columns <= ", logits.size(1),
            ", got ", words.first_column, " and ", words.columns);
    return {logits.data_ptr(),
            dtype,
            logits.stride(0),
            words.columns,
            logits.size(1) - words.columns,
            static_cast<const int64_t*>(targets.data_ptr()),
            words.ignore_index,
            words.first_column};
}

// One number of the kind that a row's sums are kept in, contiguous [rows] or [rows, width].
void check_values(const Tensor& values, int64_t rows, int64_t width, int dtype, const char* name,
                  const char* op) {
    const bool fits = width == 0 ? values.dim() == 1 : values.dim() == 2 && values.size(1) == width;
    require(fits && values.size(0) == rows && values.is_contiguous() && values.is_cpu() &&
                dtype_code(values) == (dtype == FP64 ? FP64 : FP32),
            "pyops::", op, ": ", name, " must be contiguous ",
            dtype == FP64 ? "float64" : "float32", " of ", rows, " rows, got ", Shape{values});
}

template <typename F>
void for_each_block(int64_t rows, int64_t columns, F f) {
    const int64_t blocks = (rows + BLOCK - 1) / BLOCK;
    const int64_t threads =
        rows * columns <= SERIAL ? 1 : std::max<int64_t>(1, torch::stable::get_num_threads());
    const auto deal = [&](int64_t first, int64_t last) {
        for (int64_t thread = first; thread < last; ++thread)
            for (int64_t block = thread; block < blocks; block += threads)
                f(block * BLOCK, std::min(rows, (block + 1) * BLOCK));
    };
    if (threads == 1)
        deal(0, 1);
    else
        torch::stable::parallel_for(0, threads, 1, deal);
}

void cross_entropy_statistics_(const Tensor out, const Tensor logits, const Tensor targets,
                               int64_t ignore_index, int64_t first_column, int64_t columns) {
    const char* const op = "cross_entropy_statistics_";
    const LogitRows rows = check_rows(logits, targets, {ignore_index, first_column, columns}, op);
    const int64_t n = logits.size(0);
    const bool with_sum = out.dim() == 2 && out.size(1) == 4;
    check_values(out, n, with_sum ? 4 : 3, rows.dtype, "out [rows, 3 or 4]", op);
    void* const result = out.data_ptr();
    const Kernels& kernel = kernels();
    for_each_block(n, columns, [&](int64_t begin, int64_t end) {
        kernel.cross_entropy_statistics(rows, with_sum, result, begin, end);
    });
}

void cross_entropy_gradient_(const Tensor out, const Tensor logits, const Tensor targets,
                             const Tensor maxima, const Tensor coefficients, int64_t ignore_index,
                             int64_t first_column, int64_t columns) {
    const char* const op = "cross_entropy_gradient_";
    const LogitRows rows = check_rows(logits, targets, {ignore_index, first_column, columns}, op);
    const int64_t n = logits.size(0);
    check_values(maxima, n, 0, rows.dtype, "maxima", op);
    check_values(coefficients, n, 3, rows.dtype, "coefficients [rows, 3]", op);
    require(out.dim() == 2 && out.size(0) == n && out.size(1) == logits.size(1) &&
                dtype_code(out) == rows.dtype && out.is_cpu() &&
                (out.size(1) <= 1 || out.stride(1) == 1) &&
                (n <= 1 || out.stride(0) >= out.size(1)),
            "pyops::", op, ": out must be like the logits ", Shape{logits},
            ", its rows apart, got ", Shape{out});
    if (out.data_ptr() != logits.data_ptr() && out.is_contiguous()) in_huge_pages(out);
    void* const result = out.data_ptr();
    const void *const m = maxima.data_ptr(), *const c = coefficients.data_ptr();
    const int64_t stride = out.stride(0);
    const Kernels& kernel = kernels();
    for_each_block(n, logits.size(1), [&](int64_t begin, int64_t end) {
        kernel.cross_entropy_gradient(rows, result, stride, m, c, begin, end);
    });
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "cross_entropy_statistics_", &pyops::cross_entropy_statistics_);
    PYOPS_IMPL(m, "cross_entropy_gradient_", &pyops::cross_entropy_gradient_);
}
