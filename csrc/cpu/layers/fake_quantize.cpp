// Fake quantization on tensors: checks, then numbers on torch's threads. The scales' gradients are
// summed by pieces that depend on the shape alone, and the pieces in their order.
#include <memory>
#include <tuple>

#include "../../host/box.h"
#include "../calls/layer_tensors.h"
#include "../rows/row_blocks.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

struct Grid {
    Tensor x, scale;
    Optional zero;
    FakeQuantizeSpan span{};
    int64_t outer = 0;

    Grid(const Tensor& given, const Tensor& scales, const Optional& zeros, int64_t lo, int64_t hi,
         int64_t inner, const char* op)
        : x(dense(given)), scale(dense(scales)) {
        span.dtype = dtype_code(given);
        require(span.dtype >= 0 && given.is_cpu(), "pyops::", op,
                ": x must be float32, bfloat16, float16 or float64 on the CPU, got shape ",
                Shape{given});
        span.channels = scales.numel();
        span.inner = inner;
        const int64_t block = span.channels * inner;
        require(inner >= 1 && (given.numel() == 0 || (block > 0 && given.numel() % block == 0)),
                "pyops::", op, ": ", span.channels, " scales of ", inner,
                " neighbors each must divide x, got shape ", Shape{given});
        require(fits(scales), "pyops::", op,
                ": scale must be float32 on the CPU, or float64 as x; got shape ", Shape{scales});
        require(lo < hi, "pyops::", op, ": lo must be below hi, got ", lo, " and ", hi);
        if (zeros) {
            require(fits(*zeros) && zeros->numel() == span.channels, "pyops::", op,
                    ": zero must be of scale's dtype and size, got shape ", Shape{*zeros});
            zero = dense(*zeros);
            span.zero = zero->data_ptr();
        }
        outer = block ? given.numel() / block : 0;
        span.x = x.data_ptr();
        span.scale = scale.data_ptr();
        span.low = static_cast<double>(lo);
        span.high = static_cast<double>(hi);
    }
    bool fits(const Tensor& t) const {
        return t.is_cpu() && dtype_code(t) == (span.dtype == FP64 ? FP64 : FP32);
    }
};

Tensor forward(const Tensor x, const Tensor scale, const Optional zero, int64_t lo, int64_t hi,
               int64_t inner, double) {
    Grid grid(x, scale, zero, lo, hi, inner, "fake_quantize");
    Tensor y = in_huge_pages(torch::stable::new_empty(grid.x, grid.x.sizes()));
    if (y.numel() == 0) return y;
    grid.span.out = y.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(y.numel(),
                  [&](int64_t begin, int64_t end) { kernel.fake_quantize(grid.span, begin, end); });
    return y;
}

// The gradients of scales that runs share, times `factor`.
void runs_backward(const Grid& grid, const Tensor& dscale, bool wanted, double factor) {
    const FakeQuantizeSpan& span = grid.span;
    const int64_t pieces = span.pieces(), all = grid.outer * span.channels * pieces;
    const std::unique_ptr<double[]> sums(wanted ? new double[static_cast<size_t>(all)]() : nullptr);
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) {
        kernel.fake_quantize_backward(span, first, last, sums.get());
    };
    const int64_t size = std::min(span.inner, FAKE_QUANTIZE_PIECE);
    if (all * size <= SERIAL)
        run(0, all);
    else
        torch::stable::parallel_for(0, all, std::max<int64_t>(1, SERIAL / 2 / size), run);
    if (!wanted) return;
    std::vector<double> total(static_cast<size_t>(span.channels), 0.0);
    for (int64_t p = 0; p < all; ++p)
        total[static_cast<size_t>(p / pieces % span.channels)] += sums[static_cast<size_t>(p)];
    for (double& sum : total) sum *= factor;
    kernels().narrow(dscale.data_ptr(), total.data(), span.channels, dtype_code(dscale));
}

void columns_backward(const Grid& grid, const Tensor& dscale, bool wanted, double factor) {
    const int64_t channels = grid.span.channels;
    RowSums sums(grid.outer, channels, wanted);
    const Kernels& kernel = kernels();
    sums.for_each_tile(channels, [&](const RowTile& tile, int64_t block) {
        kernel.fake_quantize_columns(grid.span, tile, sums.of_block(block));
    });
    if (!wanted) return;
    double* const all = sums.data();
    for (int64_t i = 0; i < sums.blocks() * channels; ++i) all[i] *= factor;
    sums.finish(dscale);
}

std::tuple<Tensor, Tensor> backward(const Tensor given, const Tensor x, const Tensor scale,
                                    const Optional zero, int64_t lo, int64_t hi, int64_t inner,
                                    double factor, bool input_grad, bool scale_grad) {
    const char* const op = "fake_quantize_backward";
    Grid grid(x, scale, zero, lo, hi, inner, op);
    const auto own = given.sizes(), all = x.sizes();
    require(dtype_code(given) == grid.span.dtype && given.is_cpu() && own.size() == all.size() &&
                std::equal(own.begin(), own.end(), all.begin()),
            "pyops::", op, ": dy must be of x's dtype and shape, got shape ", Shape{given});
    const Tensor dy = dense(given);
    const std::vector<int64_t> none = {0};
    Tensor dx = input_grad ? in_huge_pages(torch::stable::new_empty(grid.x, grid.x.sizes()))
                           : torch::stable::new_empty(grid.x, none);
    Tensor dscale = scale_grad ? torch::stable::new_empty(grid.scale, grid.scale.sizes())
                               : torch::stable::new_empty(grid.scale, none);
    grid.span.dy = dy.data_ptr();
    grid.span.out = input_grad ? dx.data_ptr() : nullptr;
    if (!input_grad && !scale_grad) return {dx, dscale};
    if (inner > 1)
        runs_backward(grid, dscale, scale_grad, factor);
    else
        columns_backward(grid, dscale, scale_grad, factor);
    return {dx, dscale};
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "fake_quantize", &pyops::forward);
    PYOPS_IMPL(m, "fake_quantize_backward", &pyops::backward);
}
