// bias_activation, bias_gated and their derivatives on tensors: checks, then rows on torch's
// threads.
#include <tuple>

#include "../../host/box.h"
#include "../calls/names.h"
#include "../rows/row_blocks.h"
#include "wide_bias.h"

namespace pyops {
namespace {

struct Layer {
    Tensor x;
    ActivationSpan span{};
    int64_t rows, width;
    WideBias bias;

    Layer(const Tensor& given, const Bias& b, const std::string& activation, bool gated,
          const char* op)
        : x(dense(given)), rows(0), width(check(given, b, gated, op)),
          bias(b, width, dtype_code(given)) {
        rows = width ? x.numel() / width : 0;
        span.x = x.data_ptr();
        span.bias = bias.data();
        span.columns = gated ? width / 2 : width;
        span.dtype = dtype_code(x);
        span.activation = activation_code(activation, op);
        span.gated = gated;
    }

    static int64_t check(const Tensor& x, const Bias& bias, bool gated, const char* op) {
        require(
            dtype_code(x) >= 0 && x.dim() > 0, "pyops::", op,
            ": x must be float32, bfloat16, float16 or float64 with a last dimension, got shape ",
            Shape{x});
        const int64_t width = x.sizes()[static_cast<size_t>(x.dim() - 1)];
        require(!gated || width % 2 == 0, "pyops::", op,
                ": gate | up in the last dimension need an even size, got ", Shape{x});
        WideBias::check(bias, x, width, op);
        return width;
    }
};

Tensor forward(const Tensor& x, const Bias& bias, const std::string& activation, bool gated,
               const char* op) {
    Layer layer(x, bias, activation, gated, op);
    std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
    shape.back() = layer.span.columns;
    Tensor y = in_huge_pages(torch::stable::new_empty(layer.x, shape));
    if (y.numel() == 0) return y;
    layer.span.out = y.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(y.numel(), [&](int64_t begin, int64_t end) {
        kernel.activation_forward(layer.span, begin, end);
    });
    return y;
}

std::tuple<Tensor, Tensor> backward(const Tensor& given, const Tensor& x, const Bias& bias,
                                    const std::string& activation, bool bias_grad, bool gated,
                                    const char* op) {
    Layer layer(x, bias, activation, gated, op);
    const Tensor dy = dense(given);
    const auto own = dy.sizes(), all = x.sizes();
    require(dtype_code(dy) == layer.span.dtype && own.size() == all.size() &&
                own[own.size() - 1] == layer.span.columns &&
                std::equal(own.begin(), own.end() - 1, all.begin()) && dy.is_cpu(),
            "pyops::", op, ": dy must be of x's dtype and y's shape, got shape ", Shape{given});
    Tensor dx = in_huge_pages(torch::stable::empty_like(layer.x));
    const std::vector<int64_t> shape = {bias_grad ? layer.width : 0};
    Tensor dbias = torch::stable::new_empty(layer.x, shape);
    RowSums sums(layer.rows, layer.width, bias_grad);
    layer.span.dy = dy.data_ptr();
    layer.span.out = dx.data_ptr();
    const Kernels& kernel = kernels();
    sums.for_each_tile(layer.span.columns, [&](const RowTile& tile, int64_t block) {
        kernel.activation_backward(layer.span, tile, sums.of_block(block));
    });
    if (bias_grad) sums.finish(dbias);
    return {dx, dbias};
}

Tensor bias_activation(const Tensor x, const Bias bias, const std::string activation) {
    return forward(x, bias, activation, false, "bias_activation");
}
Tensor bias_gated(const Tensor x, const Bias bias, const std::string activation) {
    return forward(x, bias, activation, true, "bias_gated");
}
std::tuple<Tensor, Tensor> bias_activation_backward(const Tensor dy, const Tensor x,
                                                    const Bias bias, const std::string activation,
                                                    bool bias_grad) {
    return backward(dy, x, bias, activation, bias_grad, false, "bias_activation_backward");
}
std::tuple<Tensor, Tensor> bias_gated_backward(const Tensor dy, const Tensor x, const Bias bias,
                                               const std::string activation, bool bias_grad) {
    return backward(dy, x, bias, activation, bias_grad, true, "bias_gated_backward");
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "bias_activation", &pyops::bias_activation);
    PYOPS_IMPL(m, "bias_gated", &pyops::bias_gated);
    PYOPS_IMPL(m, "bias_activation_backward", &pyops::bias_activation_backward);
    PYOPS_IMPL(m, "bias_gated_backward", &pyops::bias_gated_backward);
}
