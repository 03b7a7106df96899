// The product of a few rows with a matrix: checks, then stretches of the matrix on torch's threads.
#include "../../host/box.h"
#include "../calls/layer_tensors.h"
#include "../calls/on_threads.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

Tensor forward(const Tensor given, const Tensor weight_given, const Optional bias_given) {
    const auto own = given.sizes(), matrix = weight_given.sizes();
    require(dtype_code(given) >= 0 && given.dim() >= 1 && given.is_cpu(),
            "pyops::few_rows_linear: x must be float32, bfloat16, float16 or float64 [..., K] on ",
            "the CPU, got shape ", Shape{given});
    const int64_t width = own[own.size() - 1];
    require(weight_given.dim() == 2 && matrix[1] == width && weight_given.is_cpu() &&
                dtype_code(weight_given) == dtype_code(given),
            "pyops::few_rows_linear: weight must be [N, ", width, "] of x's dtype, got shape ",
            Shape{weight_given});
    if (bias_given)
        require(bias_given->dim() == 1 && bias_given->size(0) == matrix[0] &&
                    bias_given->is_cpu() && dtype_code(*bias_given) == dtype_code(given),
                "pyops::few_rows_linear: bias must be [", matrix[0], "] of x's dtype, got shape ",
                Shape{*bias_given});
    const Tensor x = dense(given), weight = dense(weight_given);
    const Tensor bias = bias_given ? dense(*bias_given) : x;
    std::vector<int64_t> shape(own.begin(), own.end());
    shape.back() = matrix[0];
    Tensor y = torch::stable::new_empty(x, shape);
    if (y.numel() == 0) return y;
    FewRows all{};
    all.x = x.data_ptr();
    all.weight = weight.data_ptr();
    all.bias = bias_given ? bias.data_ptr() : nullptr;
    all.y = y.data_ptr();
    all.width = width;
    all.outputs = matrix[0];
    all.rows = y.numel() / all.outputs;
    all.dtype = dtype_code(x);
    run_few_rows(all);
    return y;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "few_rows_linear", &pyops::forward); }
