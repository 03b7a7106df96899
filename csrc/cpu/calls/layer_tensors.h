// Operands and results of the ops between linear layers: dense where the kernels need it, in huge
// pages where that pays.
#pragma once
#include "../../host/optimizers/table.h"
#include "huge_pages.h"

namespace pyops {

inline Tensor dense(const Tensor& t) {
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// A large result in pages of 2 MiB.
inline Tensor in_huge_pages(Tensor t) {
    const int64_t bytes = t.numel() * (dtype_code(t) == FP64 ? 8 : dtype_code(t) == FP32 ? 4 : 2);
    ask_for_huge_pages(t.data_ptr(), bytes);
    return t;
}

}  // namespace pyops
