// quantize_rows, row_extents, scale_product and scale_sums_ on tensors: checks, then rows on
// torch's threads.
#include <memory>
#include <string>
#include <tuple>

#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"
#include "scaled_sums.h"

namespace pyops {
namespace {

// Calls f(first, last, scratch) on parts of `rows` rows of `width` numbers.
template <typename F>
void for_each_rows(int64_t rows, int64_t width, F f) {
    const auto run = [&](int64_t first, int64_t last) {
        const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(width)]);
        f(first, last, scratch.get());
    };
    if (rows * width <= SERIAL)
        run(0, rows);
    else
        torch::stable::parallel_for(0, rows, std::max<int64_t>(1, SERIAL / 2 / width), run);
}

struct Rows {
    Tensor x;
    std::vector<int64_t> lead;  // the shape without its last dimension
    int64_t rows = 1, width = 0;
    QuantizedRows span{};

    Rows(const Tensor& given, bool symmetric, const char* op) : x(dense(given)) {
        const int dtype = dtype_code(given);
        require(given.is_cpu() && given.dim() > 0 && dtype >= 0 && dtype != FP64, "pyops::", op,
                ": x must be float32, bfloat16 or float16 [..., width], got shape ", Shape{given});
        const auto sizes = given.sizes();
        lead.assign(sizes.begin(), sizes.end() - 1);
        for (const int64_t size : lead) rows *= size;
        width = sizes[sizes.size() - 1];
        span.x = x.data_ptr();
        span.dtype = dtype;
        span.width = width;
        span.symmetric = symmetric;
    }

    void run() {
        const Kernels& kernel = kernels();
        for_each_rows(rows, width, [&](int64_t first, int64_t last, float* scratch) {
            kernel.quantize_rows(span, first, last, scratch);
        });
    }
};

std::tuple<Tensor, Tensor, Tensor> quantize_rows(const Tensor x, const std::optional<Tensor> scales,
                                                 const std::optional<Tensor> zero_points,
                                                 bool symmetric) {
    const char* const op = "quantize_rows";
    Rows rows(x, symmetric, op);
    const bool own_zeros = scales && !symmetric;
    require(zero_points.has_value() == own_zeros, "pyops::", op,
            ": zero_points belong to scales of codes that are not symmetric; give both or neither");
    std::optional<Tensor> given, given_zeros;
    if (scales) {
        const int64_t n = scales->numel();
        require(n == 1 || n == rows.rows, "pyops::", op, ": scales must have 1 number or ",
                rows.rows, ", one for each row; got shape ", Shape{*scales});
        given = of_dtype(*scales, ScalarType::Float, n, op, "scales");
        rows.span.given = static_cast<const float*>(given->data_ptr());
        rows.span.given_stride = n == 1 ? 0 : 1;
        if (own_zeros) {
            given_zeros = of_dtype(*zero_points, ScalarType::Int, n, op, "zero_points");
            rows.span.given_zeros = static_cast<const int32_t*>(given_zeros->data_ptr());
        }
    }
    const std::vector<int64_t> none = {0};
    Tensor codes = empty_of(x, x.sizes(), symmetric ? ScalarType::Char : ScalarType::Byte);
    Tensor found = empty_of(x, rows.lead, ScalarType::Float);
    Tensor zeros = empty_of(x, symmetric ? none : rows.lead, ScalarType::Int);
    rows.span.codes = static_cast<uint8_t*>(codes.data_ptr());
    rows.span.scales = static_cast<float*>(found.data_ptr());
    rows.span.zeros = symmetric ? nullptr : static_cast<int32_t*>(zeros.data_ptr());
    rows.run();
    return {codes, found, zeros};
}

std::tuple<Tensor, Tensor> row_extents(const Tensor x, bool symmetric) {
    Rows rows(x, symmetric, "row_extents");
    Tensor lowest = empty_of(x, rows.lead, ScalarType::Float);
    Tensor highest = empty_of(x, rows.lead, ScalarType::Float);
    rows.span.lowest = static_cast<float*>(lowest.data_ptr());
    rows.span.highest = static_cast<float*>(highest.data_ptr());
    rows.run();
    return {lowest, highest};
}

Tensor scale_product(const Tensor acc, const Tensor row_scales, const Tensor column_scales,
                     const std::optional<Tensor> row_zeros, const std::optional<Tensor> sums,
                     const std::optional<Tensor> bias, const std::optional<std::string> activation,
                     ScalarType dtype) {
    const char* const op = "scale_product";
    require(acc.is_cpu() && acc.dim() > 0 && acc.scalar_type() == ScalarType::Int, "pyops::", op,
            ": acc must be int32 [..., width], got shape ", Shape{acc});
    const std::vector<int64_t> shape(acc.sizes().begin(), acc.sizes().end());
    const Tensor from = dense(acc);
    SumOperands operands(acc, shape, {row_scales, column_scales, row_zeros, sums, bias}, activation,
                         dtype, op);
    ScaledSums& span = operands.span;
    span.acc = static_cast<const int32_t*>(from.data_ptr());
    const Kernels& kernel = kernels();
    for_each_rows(operands.rows, span.width, [&](int64_t first, int64_t last, float* scratch) {
        kernel.scale_product(span, first, last, scratch);
    });
    return operands.out;
}

void scale_sums_(Tensor acc, const Tensor row_scales, const Tensor column_scales,
                 const std::optional<Tensor> row_zeros, const std::optional<Tensor> sums,
                 const std::optional<Tensor> bias) {
    const char* const op = "scale_sums_";
    require(acc.is_cpu() && acc.dim() > 0 && acc.scalar_type() == ScalarType::Int, "pyops::", op,
            ": acc must be int32 [..., width], got shape ", Shape{acc});
    const std::vector<int64_t> shape(acc.sizes().begin(), acc.sizes().end());
    const Tensor place = dense(acc);  // acc itself, or where its numbers stand side by side
    SumOperands operands(place, shape, {row_scales, column_scales, row_zeros, sums, bias},
                         std::nullopt, op);
    operands.span.acc = static_cast<const int32_t*>(place.data_ptr());
    const Kernels& kernel = kernels();
    for_each_rows(operands.rows, operands.span.width,
                  [&](int64_t first, int64_t last, float* scratch) {
                      kernel.scale_product(operands.span, first, last, scratch);
                  });
    if (!acc.is_contiguous()) torch::stable::copy_(acc, place);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "quantize_rows", &pyops::quantize_rows);
    PYOPS_IMPL(m, "row_extents", &pyops::row_extents);
    PYOPS_IMPL(m, "scale_product", &pyops::scale_product);
    PYOPS_IMPL(m, "scale_sums_", &pyops::scale_sums_);
}
