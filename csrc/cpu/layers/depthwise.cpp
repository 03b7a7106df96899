// Depthwise 3 x 3 convolution of images with their channels last: checks, then rows on torch's
// threads. The gradients of taps and bias are summed by groups of rows, which depend on the shape
// alone, and the groups in their order.
#include <algorithm>
#include <memory>
#include <string>
#include <tuple>

#include "../../host/box.h"
#include "../../math/layers/depthwise.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"
#include "../calls/names.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

constexpr int64_t STREAMED_NUMEL = 4 << 20;  // elements of a result that would fill the caches
constexpr int64_t MOST_GROUPS = 64;
constexpr int64_t GROUP_PIXELS = 128;  // of a group at least: its sums are moved for them

int64_t bytes_of(int dtype) { return dtype == FP64 ? 8 : dtype == FP32 ? 4 : 2; }

// Contiguous fp32 (float64) of any of the dtypes; `taps`: [channels, 9] becomes [9, channels].
std::vector<char> widened(const Tensor& given, bool float64, bool taps) {
    const int dtype = dtype_code(given), wide = float64 ? FP64 : FP32;
    const Tensor t = dense(given);
    const int64_t n = t.numel(), channels = taps ? n / (TAPS * TAPS) : n;
    const size_t size = static_cast<size_t>(bytes_of(wide));
    std::vector<char> straight(static_cast<size_t>(n) * size);
    if (n) kernels().scale_cast(straight.data(), t.data_ptr(), n, wide, dtype, 1.0);
    if (!taps) return straight;
    std::vector<char> turned(straight.size());
    for (int64_t c = 0; c < channels; ++c)
        for (int64_t k = 0; k < TAPS * TAPS; ++k)
            memcpy(turned.data() + static_cast<size_t>(k * channels + c) * size,
                   straight.data() + static_cast<size_t>(c * TAPS * TAPS + k) * size, size);
    return turned;
}

struct Convolution {
    Tensor x;
    DepthwiseSpan span{};
    std::vector<char> taps, bias;
    int64_t images = 0;

    Convolution(const Tensor& given, const Tensor& weight, const Optional& b, int64_t stride,
                const char* op)
        : x(dense(given)) {
        const auto sizes = given.sizes();
        require(dtype_code(given) >= 0 && given.dim() == 4 && given.is_cpu(), "pyops::", op,
                ": x must be float32, bfloat16, float16 or float64 [N, H, W, C] on the CPU, got ",
                "shape ", Shape{given});
        require(stride == 1 || stride == 2, "pyops::", op, ": stride must be 1 or 2, got ", stride);
        const auto kernel = weight.sizes();
        require(weight.dim() == 4 && kernel[0] == sizes[3] && kernel[1] == 1 && kernel[2] == TAPS &&
                    kernel[3] == TAPS && weight.is_cpu(),
                "pyops::", op, ": weight must be [", sizes[3], ", 1, 3, 3] as x has ", sizes[3],
                " channels, got shape ", Shape{weight});
        span.dtype = dtype_code(given);
        const bool float64 = span.dtype == FP64;
        const auto fits = [&](const Tensor& t) {
            return dtype_code(t) >= 0 && (dtype_code(t) == FP64) == float64;
        };
        require(fits(weight), "pyops::", op,
                ": weight must be float32, bfloat16 or float16, or float64 as x");
        taps = widened(weight, float64, true);
        if (b) {
            require(b->dim() == 1 && b->numel() == sizes[3] && b->is_cpu() &&
                        dtype_code(*b) == dtype_code(weight),
                    "pyops::", op, ": bias must be [", sizes[3], "] of weight's dtype, got shape ",
                    Shape{*b});
            bias = widened(*b, float64, false);
        }
        images = sizes[0];
        span.height = sizes[1];
        span.width = sizes[2];
        span.channels = sizes[3];
        span.out_height = span.height ? depthwise_outputs(span.height, stride) : 0;
        span.out_width = span.width ? depthwise_outputs(span.width, stride) : 0;
        span.x = x.data_ptr();
        span.taps = taps.data();
        span.bias = b ? bias.data() : nullptr;
        span.stride = static_cast<int>(stride);
        span.activation = -1;
    }

    std::vector<int64_t> out_shape() const {
        return {images, span.out_height, span.out_width, span.channels};
    }
    std::unique_ptr<char[]> scratch() const {
        return std::unique_ptr<char[]>(new char[static_cast<size_t>(
            depthwise_scratch(span) * bytes_of(span.dtype == FP64 ? FP64 : FP32))]);
    }
};

Tensor forward(const Tensor x, const Tensor weight, const Optional bias, int64_t stride,
               const std::optional<std::string> activation) {
    const char* const op = "depthwise_conv2d";
    Convolution conv(x, weight, bias, stride, op);
    if (activation) conv.span.activation = activation_code(*activation, op);
    Tensor y = in_huge_pages(torch::stable::new_empty(conv.x, conv.out_shape()));
    if (y.numel() == 0) return y;
    conv.span.out = y.data_ptr();
    conv.span.streams = y.numel() >= STREAMED_NUMEL;
    const int64_t rows = conv.images * conv.span.out_height;
    const int64_t row = conv.span.out_width * conv.span.channels;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        kernel.depthwise_forward(conv.span, begin, end, conv.scratch().get());
    };
    if (rows * row <= SERIAL)
        run(0, rows);
    else
        torch::stable::parallel_for(0, rows, std::max<int64_t>(1, SERIAL / 2 / row), run);
    return y;
}

// The groups' sums, [groups][10][channels], to the gradients: added in their order, rounded once.
void finish_sums(const Tensor& dweight, const Tensor& dbias, const double* sums, int64_t groups,
                 int64_t channels) {
    std::vector<double> total(static_cast<size_t>(DEPTHWISE_SUMS * channels), 0.0);
    std::vector<double> turned(total.size());
    for (int64_t g = 0; g < groups; ++g)
        for (size_t i = 0; i < total.size(); ++i)
            total[i] += sums[static_cast<size_t>(g) * total.size() + i];
    for (int64_t c = 0; c < channels; ++c)
        for (int64_t k = 0; k < TAPS * TAPS; ++k)
            turned[static_cast<size_t>(c * TAPS * TAPS + k)] =
                total[static_cast<size_t>(k * channels + c)];
    kernels().narrow(dweight.data_ptr(), turned.data(), channels * TAPS * TAPS,
                     dtype_code(dweight));
    kernels().narrow(dbias.data_ptr(), total.data() + TAPS * TAPS * channels, channels,
                     dtype_code(dbias));
}

std::tuple<Tensor, Tensor, Tensor> backward(const Tensor given, const Tensor x, const Tensor weight,
                                            int64_t stride, bool input_grad, bool weight_grad) {
    const char* const op = "depthwise_conv2d_backward";
    Convolution conv(x, weight, std::nullopt, stride, op);
    const std::vector<int64_t> shape = conv.out_shape(), none = {0};
    const auto own = given.sizes();
    require(given.is_cpu() && dtype_code(given) == conv.span.dtype && given.dim() == 4 &&
                std::equal(shape.begin(), shape.end(), own.begin()),
            "pyops::", op, ": dy must be of x's dtype and [", shape[0], ", ", shape[1], ", ",
            shape[2], ", ", shape[3], "], as y; got shape ", Shape{given});
    const Tensor dy = dense(given);
    const int64_t channels = conv.span.channels;
    Tensor dx = input_grad ? in_huge_pages(torch::stable::new_empty(conv.x, conv.x.sizes()))
                           : torch::stable::new_empty(conv.x, none);
    const std::vector<int64_t> kernel_shape = {channels, 1, TAPS, TAPS}, bias_shape = {channels};
    Tensor dweight = torch::stable::new_empty(weight, weight_grad ? kernel_shape : none);
    Tensor dbias = torch::stable::new_empty(weight, weight_grad ? bias_shape : none);
    conv.span.dy = dy.data_ptr();
    conv.span.out = input_grad ? dx.data_ptr() : nullptr;
    conv.span.streams = conv.x.numel() >= STREAMED_NUMEL;
    const int64_t rows = conv.x.numel() ? conv.images * conv.span.height : 0;
    const int64_t pixels = std::max<int64_t>(1, conv.span.width);
    const int64_t each =
        std::max((rows + MOST_GROUPS - 1) / MOST_GROUPS, (GROUP_PIXELS + pixels - 1) / pixels);
    const int64_t groups = (rows + each - 1) / each, sums = DEPTHWISE_SUMS * channels;
    const std::unique_ptr<double[]> partial(
        weight_grad ? new double[static_cast<size_t>(groups * sums)]() : nullptr);
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        const std::unique_ptr<char[]> scratch = conv.scratch();
        for (int64_t g = begin; g < end; ++g)
            kernel.depthwise_backward(conv.span, g * each, std::min(rows, (g + 1) * each),
                                      weight_grad ? partial.get() + g * sums : nullptr,
                                      scratch.get());
    };
    if (input_grad || weight_grad) {
        if (conv.x.numel() <= SERIAL)
            run(0, groups);
        else
            torch::stable::parallel_for(0, groups, 1, run);
    }
    if (weight_grad) finish_sums(dweight, dbias, partial.get(), groups, channels);
    return {dx, dweight, dbias};
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "depthwise_conv2d", &pyops::forward);
    PYOPS_IMPL(m, "depthwise_conv2d_backward", &pyops::backward);
}
