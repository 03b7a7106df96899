// What makes numbers of int32 sums, checked, with its result: for scale_product.
#pragma once
#include <string>

#include "../calls/names.h"
#include "scaled.h"
#include "../calls/typed_tensors.h"

namespace pyops {

struct SumTensors {
    Tensor row_scales, column_scales;
    std::optional<Tensor> row_zeros, sums, bias;
};

struct SumOperands {
    SumTensors kept;
    ScaledSums span{};
    int64_t rows = 0;
    Tensor out;

    // For sums of `shape`, the last dimension of which is that of the outputs.
    SumOperands(const Tensor& like, const std::vector<int64_t>& shape, const SumTensors& given,
                const std::optional<std::string>& activation, ScalarType dtype, const char* op)
        : SumOperands(empty_of(like, shape, dtype), shape, given, activation, op) {
        span.dtype = dtype_code(out);
        require(span.dtype >= 0 && span.dtype != FP64, "pyops::", op,
                ": dtype must be float32, bfloat16 or float16");
        ask_for_huge_pages(out.data_ptr(), out.numel() * (span.dtype == FP32 ? 4 : 2));
    }

    // For a result that takes the place of the sums, as fp32.
    SumOperands(const Tensor& result, const std::vector<int64_t>& shape, const SumTensors& given,
                const std::optional<std::string>& activation, const char* op)
        : kept(given), out(result) {
        span.width = shape.back();
        rows = 1;
        for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
        const int64_t n = given.row_scales.numel();
        require(n == 1 || n == rows, "pyops::", op, ": row_scales must have 1 number or ", rows,
                ", one for each row; got shape ", Shape{given.row_scales});
        require(given.row_zeros.has_value() == given.sums.has_value(), "pyops::", op,
                ": row_zeros and sums belong together; give both or neither");
        span.row_stride = n == 1 ? 0 : 1;
        span.row_scales = numbers<float>(kept.row_scales, ScalarType::Float, n, op, "row_scales");
        span.column_scales =
            numbers<float>(kept.column_scales, ScalarType::Float, span.width, op, "column_scales");
        if (kept.row_zeros) {
            span.row_zeros = numbers<int32_t>(*kept.row_zeros, ScalarType::Int, n, op, "row_zeros");
            span.sums = numbers<int32_t>(*kept.sums, ScalarType::Int, span.width, op, "sums");
        }
        if (kept.bias)
            span.bias = numbers<float>(*kept.bias, ScalarType::Float, span.width, op, "bias");
        span.activation = activation ? activation_code(*activation, op) : -1;
        span.dtype = FP32;
        span.out = out.data_ptr();
    }

private:
    template <typename T>
    static const T* numbers(Tensor& t, ScalarType dtype, int64_t n, const char* op,
                            const char* name) {
        t = of_dtype(t, dtype, n, op, name);
        return static_cast<const T*>(t.data_ptr());
    }
};

}  // namespace pyops
