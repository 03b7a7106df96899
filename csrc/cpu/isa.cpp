// Picks the table of kernels: the best instruction set that the machine has, or the one that
// PYOPS_CPU_ISA names.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

namespace pyops {

extern const Kernels kernels_baseline;
#ifdef PYOPS_X86
extern const Kernels kernels_avx2, kernels_avx512;
#endif

namespace {

const Kernels* find(const char* name) {
#ifdef PYOPS_X86
    __builtin_cpu_init();
    if (!std::strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return &kernels_avx512;
    // Every CPU with AVX2 has F16C; __builtin_cpu_supports("f16c") is not known to older compilers.
    if (!std::strcmp(name, "avx2") && __builtin_cpu_supports("avx2") &&
        __builtin_cpu_supports("fma"))
        return &kernels_avx2;
#endif
    return std::strcmp(name, "baseline") ? nullptr : &kernels_baseline;
}

const Kernels* choose() {
    const char* wanted = std::getenv("PYOPS_CPU_ISA");
    if (wanted && *wanted)
        if (const Kernels* found = find(wanted)) return found;
    for (const char* name : {"avx512", "avx2"})
        if (const Kernels* found = find(name)) return found;
    return &kernels_baseline;
}

std::atomic<const Kernels*>& current() {
    static std::atomic<const Kernels*> table{choose()};
    return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

bool has_isa(const char* name) { return find(name) != nullptr; }

bool use_isa(const char* name) {
    const Kernels* found = find(name);
    if (found) current().store(found);
    return found != nullptr;
}

}  // namespace pyops
