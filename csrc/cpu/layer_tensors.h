// Operands and results of the ops between linear layers: dense where the kernels want it, in huge
// pages where that pays.
#pragma once
#include <sys/mman.h>

#include "../host/table.h"

namespace pyops {

inline Tensor dense(const Tensor& t) {
    return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

// A result too large for the allocator to keep is fresh memory in every call, and its page faults,
// one per 4 KiB, cost more than filling it. Where the system leaves the choice to the program
// (transparent_hugepage = madvise), this asks for pages of 2 MiB.
inline Tensor in_huge_pages(Tensor t) {
#ifdef MADV_HUGEPAGE
    constexpr int64_t WORTH_IT = 8 << 20, PAGE = 4096;
    const int64_t bytes = t.numel() * (dtype_code(t) == FP64 ? 8 : dtype_code(t) == FP32 ? 4 : 2);
    if (bytes < WORTH_IT) return t;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(t.data_ptr()) + PAGE - 1) / PAGE * PAGE;
    // A hint: failure changes nothing
    madvise(reinterpret_cast<void*>(start), static_cast<size_t>(bytes - PAGE), MADV_HUGEPAGE);
#endif
    return t;
}

}  // namespace pyops
