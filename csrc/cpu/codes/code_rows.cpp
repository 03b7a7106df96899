// code_rows_product and decode_rows on tensors.
#include "../../host/box.h"
#include "code_product.h"

namespace pyops {
namespace {

// x [rows, width] as fp32: where it is, or in `made`.
const float* straight(const Tensor& x, const CodeProduct& rows, int dtype,
                      std::vector<float>& made) {
    if (dtype == FP32) return static_cast<const float*>(x.data_ptr());
    made.resize(static_cast<size_t>(rows.rows * rows.width));
    if (!made.empty())
        kernels().scale_cast(made.data(), x.data_ptr(), rows.rows * rows.width, FP32, dtype, 1.0);
    return made.data();
}

Tensor code_rows_product(const Tensor x, const Tensor codes, const Tensor scales,
                         const std::optional<Tensor> zero_points, const std::optional<Tensor> bias,
                         int64_t bits) {
    const char* const op = "code_rows_product";
    const int dtype = dtype_code(x);
    require(x.is_cpu() && x.dim() == 2 && dtype >= 0 && dtype != FP64, "pyops::", op,
            ": x must be float32, bfloat16 or float16 [rows, width], got shape ", Shape{x});
    const int64_t width = x.sizes()[1];
    const Coded coded(codes, scales, zero_points, width, bits, unit_of(bits), op);
    CodeProduct rows = product_of(coded, x.sizes()[0], width, bits, dtype);
    std::optional<Tensor> own_bias;
    if (bias) {
        require(bias->dim() == 1, "pyops::", op, ": bias must be [", rows.outputs, "], got shape ",
                Shape{*bias});
        own_bias = of_dtype(*bias, ScalarType::Float, rows.outputs, op, "bias");
        rows.bias = static_cast<const float*>(own_bias->data_ptr());
    }
    const std::vector<int64_t> shape = {rows.rows, rows.outputs};
    const Tensor from = dense(x);
    Tensor out = torch::stable::new_empty(from, shape);
    rows.out = out.data_ptr();
    std::vector<float> made;
    run_code_product(rows, straight(from, rows, dtype, made));
    return out;
}

Tensor decode_rows(const Tensor codes, const Tensor scales, const std::optional<Tensor> zero_points,
                   int64_t width, int64_t bits, ScalarType dtype) {
    const char* const op = "decode_rows";
    const Coded coded(codes, scales, zero_points, width, bits, bits == 8 ? 1 : 2, op);
    const std::vector<int64_t> shape = {coded.rows, width};
    Tensor out = empty_of(codes, shape, dtype);
    const int code = dtype_code(out);
    require(code >= 0 && code != FP64, "pyops::", op,
            ": dtype must be float32, bfloat16 or float16");
    ask_for_huge_pages(out.data_ptr(), out.numel() * (code == FP32 ? 4 : 2));
    const CodeRows rows{
        coded.code_data(), coded.scale_data(), coded.zero_data(), out.data_ptr(),         width,
        coded.row_bytes,   coded.group,        coded.groups,      static_cast<int>(bits), code,
        coded.kind};
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) {
        const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(width)]);
        kernel.decode_rows(rows, first, last, scratch.get());
    };
    if (out.numel() <= SERIAL)
        run(0, coded.rows);
    else
        torch::stable::parallel_for(0, coded.rows, std::max<int64_t>(1, SERIAL / 2 / width), run);
    return out;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "code_rows_product", &pyops::code_rows_product);
    PYOPS_IMPL(m, "decode_rows", &pyops::decode_rows);
}
