// A number of a product with codes as it is stored, its bias added.
#pragma once
#include "code_rows.h"
#include "../rows/storage.h"

namespace pyops::PYOPS_ISA {
namespace {

inline void put(const CodeProduct& rows, int64_t r, int64_t o, float sum) {
    const float value = rows.bias ? sum + rows.bias[o] : sum;
    const int64_t at = r * rows.outputs + o;
    if (rows.dtype == FP32)
        static_cast<float*>(rows.out)[at] = value;
    else
        static_cast<uint16_t*>(rows.out)[at] =
            rows.dtype == BF16 ? float_to_bf16(value) : float_to_fp16(value);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
