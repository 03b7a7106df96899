// Tensors of a given dtype for ops that take several: operands as the kernels take them, and
// results.
#pragma once
#include "layer_tensors.h"

namespace pyops {

using torch::headeronly::ScalarType;

inline const char* name_of(ScalarType dtype) {
    return dtype == ScalarType::Float  ? "float32"
           : dtype == ScalarType::Int  ? "int32"
           : dtype == ScalarType::Char ? "int8"
           : dtype == ScalarType::Byte ? "uint8"
                                       : "float8_e4m3fn";
}

// Contiguous, on the CPU, of `n` numbers; throws for anything else.
inline Tensor of_dtype(const Tensor& t, ScalarType dtype, int64_t n, const char* op,
                       const char* name) {
    require(t.is_cpu() && t.scalar_type() == dtype && t.numel() == n, "pyops::", op, ": ", name,
            " must be ", name_of(dtype), " of ", n, " numbers on the CPU, got shape ", Shape{t});
    return dense(t);
}

template <typename Sizes>
Tensor empty_of(const Tensor& like, const Sizes& shape, ScalarType dtype) {
    return torch::stable::new_empty(like, shape, dtype);
}

}  // namespace pyops
