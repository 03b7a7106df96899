// Pages of 2 MiB for large results.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace pyops {

// A result too large for the allocator to keep is fresh memory in every call, and its page faults,
// one per 4 KiB, cost more than filling it. Where the system leaves the choice to the program
// (transparent_hugepage = madvise), this asks for pages of 2 MiB.
inline void ask_for_huge_pages(void* data, int64_t bytes, int64_t worth_it = 8 << 20) {
#ifdef MADV_HUGEPAGE
    constexpr int64_t PAGE = 4096;
    if (bytes < worth_it) return;
    const uintptr_t start = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
    // A hint: failure changes nothing
    madvise(reinterpret_cast<void*>(start), static_cast<size_t>(bytes - PAGE), MADV_HUGEPAGE);
#else
    (void)data, (void)bytes, (void)worth_it;
#endif
}

}  // namespace pyops
