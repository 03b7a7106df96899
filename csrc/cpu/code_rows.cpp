// code_rows_product and decode_rows on tensors: checks, x in the order that the kernel wants, then
// outputs on torch's threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "../host/box.h"
#include "code_rows.h"
#include "kernels.h"
#include "loop.h"
#include "typed_tensors.h"

namespace pyops {
namespace {

int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// x [rows, width] as fp32 [rows, stride], in the order of code_rows.h.
std::vector<float> arranged(const Tensor& x, const CodeProduct& rows, int dtype) {
    std::vector<float> straight(static_cast<size_t>(rows.rows * rows.width));
    if (!straight.empty())
        kernels().scale_cast(straight.data(), x.data_ptr(), rows.rows * rows.width, FP32, dtype,
                             1.0);
    std::vector<float> found(static_cast<size_t>(rows.rows * rows.stride), 0.0f);
    for (int64_t r = 0; r < rows.rows; ++r) {
        const float* const from = straight.data() + r * rows.width;
        float* const to = found.data() + r * rows.stride;
        if (rows.bits == 8) {
            std::copy(from, from + rows.width, to);
            continue;
        }
        for (int64_t i = 0; i < rows.width; ++i) {
            const int64_t within = i % NIBBLE_BLOCK;
            to[i - within + within % 8 * CODE_LANES + within / 8] = from[i];
        }
    }
    return found;
}

// Codes with their scales, checked, for rows of `width` numbers.
struct Coded {
    Tensor codes, scales;
    std::optional<Tensor> zeros;
    int64_t rows, row_bytes, group, groups;
    CodeKind kind;

    // `unit`: numbers of a group, where there are several, are a multiple of it.
    Coded(const Tensor& c, const Tensor& s, const std::optional<Tensor>& z, int64_t width,
          int64_t bits, int64_t unit, const char* op)
        : codes(c), scales(s), zeros(z) {
        require(bits == 4 || bits == 8, "pyops::", op, ": bits must be 4 or 8, got ", bits);
        row_bytes = bits == 8 ? width : (width + 1) / 2;
        require(c.dim() == 2 && c.sizes()[1] == row_bytes, "pyops::", op,
                ": codes must be [outputs, ", row_bytes, "] for rows of ", width,
                " numbers, got shape ", Shape{c});
        rows = c.sizes()[0];
        require(s.dim() == 2 && s.sizes()[0] == rows && s.sizes()[1] >= 1, "pyops::", op,
                ": scales must be [", rows, ", groups], got shape ", Shape{s});
        groups = s.sizes()[1];
        group = std::max<int64_t>(1, width / groups);
        require(groups == 1 || (group * groups == width && group % unit == 0), "pyops::", op, ": ",
                groups, " groups must cut ", width, " inputs into equal parts that are multiples ",
                "of ", unit);
        kind = z                                                           ? WITHOUT_SIGN
               : bits == 8 && c.scalar_type() == ScalarType::Float8_e4m3fn ? FLOAT_E4M3
                                                                           : WITH_SIGN;
        const ScalarType dtype = kind == FLOAT_E4M3               ? ScalarType::Float8_e4m3fn
                                 : kind == WITH_SIGN && bits == 8 ? ScalarType::Char
                                                                  : ScalarType::Byte;
        codes = of_dtype(c, dtype, rows * row_bytes, op, "codes");
        scales = of_dtype(s, ScalarType::Float, rows * groups, op, "scales");
        if (z) zeros = of_dtype(*z, ScalarType::Int, rows * groups, op, "zero_points");
    }
    const uint8_t* code_data() const { return static_cast<const uint8_t*>(codes.data_ptr()); }
    const float* scale_data() const { return static_cast<const float*>(scales.data_ptr()); }
    const int32_t* zero_data() const {
        return zeros ? static_cast<const int32_t*>(zeros->data_ptr()) : nullptr;
    }
};

Tensor code_rows_product(const Tensor x, const Tensor codes, const Tensor scales,
                         const std::optional<Tensor> zero_points, const std::optional<Tensor> bias,
                         int64_t bits) {
    const char* const op = "code_rows_product";
    const int dtype = dtype_code(x);
    require(x.is_cpu() && x.dim() == 2 && dtype >= 0 && dtype != FP64, "pyops::", op,
            ": x must be float32, bfloat16 or float16 [rows, width], got shape ", Shape{x});
    CodeProduct rows{};
    rows.rows = x.sizes()[0];
    rows.width = x.sizes()[1];
    const Coded coded(codes, scales, zero_points, rows.width, bits, bits == 8 ? CODE_LANES : 8, op);
    rows.bits = static_cast<int>(bits);
    rows.kind = coded.kind;
    rows.stride = up_to(rows.width, bits == 8 ? CODE_LANES : NIBBLE_BLOCK);
    rows.codes = coded.code_data();
    rows.scales = coded.scale_data();
    rows.zeros = coded.zero_data();
    rows.row_bytes = coded.row_bytes;
    rows.outputs = coded.rows;
    rows.group = coded.group;
    rows.groups = coded.groups;
    rows.dtype = dtype;
    std::optional<Tensor> own_bias;
    if (bias) {
        own_bias = of_dtype(*bias, ScalarType::Float, rows.outputs, op, "bias");
        rows.bias = static_cast<const float*>(own_bias->data_ptr());
    }
    const std::vector<int64_t> shape = {rows.rows, rows.outputs};
    const Tensor from = dense(x);
    Tensor out = torch::stable::new_empty(from, shape);
    const std::vector<float> numbers = arranged(from, rows, dtype);
    rows.x = numbers.data();
    rows.out = out.data_ptr();
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) { kernel.code_product(rows, begin, end); };
    const int64_t each = rows.rows * rows.width;
    if (each * rows.outputs <= SERIAL)
        run(0, rows.outputs);
    else
        torch::stable::parallel_for(0, rows.outputs, std::max<int64_t>(4, SERIAL / each), run);
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
