// For the *_kernel.cpp files, which are compiled once per instruction set: names and sizes.
// vector.h has the registers.
//
//   PYOPS_ISA   flags                                  machine
//   baseline    none (x86-64: SSE2; aarch64: NEON)     any
//   avx2        AVX2, FMA, F16C                        x86 since 2013 (Haswell, Zen)
//   avx512      AVX-512 F, BW, DQ, VL                  x86 since 2017 (Skylake-X, Zen 4)
//
// There is no level for AVX512-BF16: its vcvtneps2bf16 takes subnormal numbers for zero, so results
// would depend on the machine, and the kernels wait for memory anyway.
//
// A file here must define nothing with external linkage outside its instruction set's namespace,
// and use no template or inline function of the C++ library: the linker keeps one copy of such a
// function, which may be the AVX-512 one, and an older machine would stop on it. The formulas of
// csrc/math are always inlined.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../math/round.h"
#include "../math/optimizers/table.h"
#include "kernels.h"

#define PYOPS_VECTORISE _Pragma("GCC ivdep")

namespace pyops::PYOPS_ISA {
namespace {

constexpr int64_t TILE = 1024;  // elements worked on at a time: operands and scratch stay in L1

inline int64_t size_of(int dtype) { return dtype == FP32 ? 4 : dtype == FP64 ? 8 : 2; }

inline char* at(void* base, int64_t index, int dtype) {
    return static_cast<char*>(base) + index * size_of(dtype);
}
inline const char* at(const void* base, int64_t index, int dtype) {
    return static_cast<const char*>(base) + index * size_of(dtype);
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
