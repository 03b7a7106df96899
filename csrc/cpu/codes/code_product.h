// Products of a few rows with codes as weights: operands, checked, and outputs on torch's threads.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "code_rows.h"
#include "../kernels.h"
#include "../calls/loop.h"
#include "../calls/typed_tensors.h"

namespace pyops {

inline int64_t up_to(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

// The rows as fp32 [rows, stride], in the order of code_rows.h.
inline std::vector<float> arranged(const float* x, const CodeProduct& rows) {
    std::vector<float> found(static_cast<size_t>(rows.rows * rows.stride), 0.0f);
    for (int64_t r = 0; r < rows.rows; ++r) {
        const float* const from = x + r * rows.width;
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

// Whether codes are whole numbers whose products with whole numbers are summed up exactly.
inline bool are_whole(const CodeProduct& rows) {
    if (rows.kind == FLOAT_E4M3 || rows.width == 0 || rows.width > FIXED_WIDTH) return false;
    return rows.groups == 1 ||
           (rows.bits == 4 && rows.kind == WITH_SIGN && rows.group % NIBBLE_BLOCK == 0);
}

// The rows as whole numbers.
struct WholeRows {
    FixedRows rows{};

    WholeRows(const float* x, const CodeProduct& product) {
        const int64_t n = product.rows, unit = product.bits == 4 ? NIBBLE_BLOCK : FIXED_CHUNK;
        rows.x = x;
        rows.width = product.width;
        rows.bits = product.bits;
        rows.chunks = up_to(product.width, unit) / FIXED_CHUNK;
        const int64_t bytes = n * rows.chunks * FIXED_DIGITS * FIXED_CHUNK;
        digits_.reset(new int8_t[static_cast<size_t>(bytes + FIXED_CHUNK)]);
        sums_.resize(static_cast<size_t>(n));
        units_.resize(static_cast<size_t>(n));
        // Where a line of the caches begins: a chunk's digits are then in one
        const auto place = reinterpret_cast<uintptr_t>(digits_.get());
        rows.digits = digits_.get() + (FIXED_CHUNK - place % FIXED_CHUNK) % FIXED_CHUNK;
        rows.sums = sums_.data();
        rows.units = units_.data();
        if (product.groups > 1) {
            offsets_.resize(static_cast<size_t>(n * rows.chunks / 2 * CODE_LANES));
            rows.offsets = offsets_.data();
        }
        const Kernels& kernel = kernels();
        const auto run = [&](int64_t first, int64_t last) { kernel.fixed_rows(rows, first, last); };
        if (n * product.width <= SERIAL)
            run(0, n);
        else
            torch::stable::parallel_for(0, n, 1, run);
    }

private:
    std::unique_ptr<int8_t[]> digits_;
    std::vector<int32_t> offsets_;
    std::vector<int64_t> sums_;
    std::vector<double> units_;
};

// Outputs on torch's threads.
template <typename F>
void for_outputs(const CodeProduct& rows, F run) {
    const int64_t each = rows.rows * rows.width;
    if (each * rows.outputs <= SERIAL)
        run(0, rows.outputs);
    else
        torch::stable::parallel_for(0, rows.outputs, std::max<int64_t>(4, SERIAL / each), run);
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
        if (z) {
            require(z->dim() == 2 && z->sizes()[1] == groups, "pyops::", op,
                    ": zero_points must be [", rows, ", ", groups, "], got shape ", Shape{*z});
            zeros = of_dtype(*z, ScalarType::Int, rows * groups, op, "zero_points");
        }
    }
    const uint8_t* code_data() const { return static_cast<const uint8_t*>(codes.data_ptr()); }
    const float* scale_data() const { return static_cast<const float*>(scales.data_ptr()); }
    const int32_t* zero_data() const {
        return zeros ? static_cast<const int32_t*>(zeros->data_ptr()) : nullptr;
    }
};

// What the kernel is told of `coded` and of rows of `width` numbers, but for x, bias and out.
inline CodeProduct product_of(const Coded& coded, int64_t rows, int64_t width, int64_t bits,
                              int dtype) {
    CodeProduct all{};
    all.rows = rows;
    all.width = width;
    all.bits = static_cast<int>(bits);
    all.kind = coded.kind;
    all.stride = up_to(width, bits == 8 ? CODE_LANES : NIBBLE_BLOCK);
    all.codes = coded.code_data();
    all.scales = coded.scale_data();
    all.zeros = coded.zero_data();
    all.row_bytes = coded.row_bytes;
    all.outputs = coded.rows;
    all.group = coded.group;
    all.groups = coded.groups;
    all.dtype = dtype;
    return all;
}

// Numbers of a group of codes, where there are several groups, are a multiple of this.
inline int64_t unit_of(int64_t bits) { return bits == 8 ? CODE_LANES : 8; }

// All outputs of x [rows, width].
inline void run_code_product(CodeProduct rows, const float* x) {
    const Kernels& kernel = kernels();
    if (are_whole(rows)) {
        const WholeRows whole(x, rows);
        for_outputs(rows, [&](int64_t begin, int64_t end) {
            kernel.fixed_product(rows, whole.rows, begin, end);
        });
        return;
    }
    const std::vector<float> ordered = arranged(x, rows);
    rows.x = ordered.data();
    for_outputs(rows, [&](int64_t begin, int64_t end) { kernel.code_product(rows, begin, end); });
}

}  // namespace pyops
