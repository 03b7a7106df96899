// bias_dropout_add, dropout and the first one's derivative on tensors: checks, then runs of
// consecutive indices on torch's threads.
#include <tuple>

#include "../../host/box.h"
#include "../rows/row_blocks.h"
#include "wide_bias.h"

namespace pyops {
namespace {

// What `state` and `p` say; the offset of the first element apart.
struct Stream {
    uint64_t offset = 0;
    DropoutSpan span{};

    Stream(const Tensor& x, const Bias& state, double p, const char* op) {
        require(dtype_code(x) >= 0, "pyops::", op,
                ": x must be float32, bfloat16, float16 or float64");
        require(p >= 0.0 && p <= 1.0, "pyops::", op, ": p must be a probability in [0, 1], got ",
                p);
        span.dtype = dtype_code(x);
        span.p = static_cast<float>(p);
        span.scale = p < 1.0 ? 1.0 / (1.0 - p) : 0.0;
        span.drops = state && p > 0.0;
        if (!state) return;
        int32_t dtype = 0;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(state->get(), &dtype));
        require(dtype == aoti_torch_dtype_int64() && state->dim() == 1 && state->numel() == 2 &&
                    state->is_contiguous() && state->is_cpu(),
                "pyops::", op,
                ": state must be contiguous int64 [2], key and offset, on x's device, got shape ",
                Shape{*state});
        const int64_t* numbers = static_cast<const int64_t*>(state->data_ptr());
        require(numbers[1] >= 0, "pyops::", op,
                ": state's second number is an offset, 0 or more; got ", numbers[1]);
        span.key = static_cast<uint64_t>(numbers[0]);
        offset = static_cast<uint64_t>(numbers[1]);
    }
};

int64_t last_size(const Tensor& x) {
    return x.dim() ? x.sizes()[static_cast<size_t>(x.dim() - 1)] : 1;
}

Tensor bias_dropout_add(const Tensor given, const Bias bias, const Bias residual, const Bias state,
                        double p) {
    const char* const op = "bias_dropout_add";
    Stream stream(given, state, p, op);
    const Tensor x = dense(given);
    stream.span.columns = last_size(x);
    WideBias::check(bias, x, stream.span.columns, op);
    const WideBias wide(bias, stream.span.columns, stream.span.dtype, false);
    Bias added;
    if (residual) {
        const auto sizes = residual->sizes(), own = x.sizes();
        require(dtype_code(*residual) == stream.span.dtype && residual->is_cpu() &&
                    sizes.size() == own.size() && std::equal(own.begin(), own.end(), sizes.begin()),
                "pyops::", op, ": residual must be as x, ", Shape{x},
                ", of its dtype and device, got ", Shape{*residual});
        added = dense(*residual);
        stream.span.residual = added->data_ptr();
    }
    Tensor out = in_huge_pages(torch::stable::empty_like(x));
    stream.span.x = x.data_ptr();
    stream.span.bias = wide.data();
    stream.span.out = out.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(x.numel(), [&](int64_t begin, int64_t end) {
        kernel.dropout(stream.span, begin, end, stream.offset + static_cast<uint64_t>(begin));
    });
    return out;
}

std::tuple<Tensor, Tensor> bias_dropout_add_backward(const Tensor given, const Bias state, double p,
                                                     bool bias_grad) {
    Stream stream(given, state, p, "bias_dropout_add_backward");
    require(!bias_grad || given.dim() > 0,
            "pyops::bias_dropout_add_backward: a number without dimensions has no bias; "
            "bias_grad=False");
    const Tensor dy = dense(given);
    const int64_t columns = last_size(dy), rows = columns ? dy.numel() / columns : 0;
    const std::vector<int64_t> none = {0}, one = {bias_grad ? columns : 0};
    Tensor dx = stream.span.drops ? in_huge_pages(torch::stable::empty_like(dy))
                                  : torch::stable::new_empty(dy, none);
    Tensor dbias = torch::stable::new_empty(dy, one);
    stream.span.x = dy.data_ptr();
    stream.span.out = stream.span.drops ? dx.data_ptr() : nullptr;
    stream.span.columns = columns;
    RowSums sums(rows, columns, bias_grad);
    const Kernels& kernel = kernels();
    if (bias_grad || stream.span.drops)
        sums.for_each_tile(columns, [&](const RowTile& tile, int64_t block) {
            kernel.dropout_backward(stream.span, tile, stream.offset, sums.of_block(block));
        });
    if (bias_grad) sums.finish(dbias);
    return {dx, dbias};
}

Tensor dropout(const Tensor given, const Tensor state, double p, int64_t row, int64_t row_stride) {
    Stream stream(given, state, p, "dropout");
    require(row >= 1 && row_stride >= 0, "pyops::dropout: need row >= 1 and row_stride >= 0; got ",
            row, ", ", row_stride);
    const Tensor x = dense(given);
    Tensor out = in_huge_pages(torch::stable::empty_like(x));
    stream.span.x = x.data_ptr();
    stream.span.out = out.data_ptr();
    const Kernels& kernel = kernels();
    for_each_part(x.numel(), [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t line = begin / row, column = begin % row;
            const int64_t stop = row == row_stride ? end : std::min(end, begin + row - column);
            kernel.dropout(stream.span, begin, stop,
                           stream.offset + static_cast<uint64_t>(line * row_stride + column));
            begin = stop;
        }
    });
    return out;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "bias_dropout_add", &pyops::bias_dropout_add);
    PYOPS_IMPL(m, "bias_dropout_add_backward", &pyops::bias_dropout_add_backward);
    PYOPS_IMPL(m, "dropout", &pyops::dropout);
}
