// Stands in for CUDA's header for a race check on the host: each thread of a CTA is a fiber of
// ThreadSanitizer with a vector clock of its own, each CTA a thread of the system.
//
// Barriers order memory, shuffles and votes order nothing. A fence before an atomic releases, a
// fence after it acquires. Barriers and fences know where they stand in the source, so that any of
// them can be taken out of a run without compiling again: see runtime.cpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static thread_local  // a CTA is a thread
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads() emulation::syncthreads(__FILE__, __LINE__)
#define __threadfence() emulation::fence(__FILE__, __LINE__)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// Written by the runtime, which is not instrumented.
extern thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

void launch(unsigned grid, unsigned threads, const std::function<void()>& body);
void syncthreads(const char* file, int line);
void fence(const char* file, int line);
uint64_t exchange(uint64_t value, unsigned from);
unsigned ballot(bool holds);
unsigned atomic_inc(unsigned* address, unsigned last);

// In words of four bytes or in bytes, through volatile, so that the access that is seen is this
// one; in line, as on a GPU.
template <typename Word>
void copy(void* to, const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof(Word); ++i)
        static_cast<volatile Word*>(to)[i] = static_cast<const volatile Word*>(from)[i];
}
template <typename T>
void move(void* to, const void* from, const void* there) {
    if (reinterpret_cast<uintptr_t>(there) % sizeof(T)) std::abort();
    if constexpr (sizeof(T) % 4 == 0) copy<uint32_t>(to, from, sizeof(T));
    else copy<unsigned char>(to, from, sizeof(T));
}

}  // namespace emulation

inline unsigned __ballot_sync(unsigned, bool holds) { return emulation::ballot(holds); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = emulation::exchange(bits, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned atomicInc(unsigned* address, unsigned last) {
    return emulation::atomic_inc(address, last);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

template <typename T>
T __ldcs(const T* from) {
    T value;
    emulation::move<T>(&value, from, from);
    return value;
}
template <typename T>
T __ldcg(const T* from) {
    return __ldcs(from);
}
template <typename T>
void __stcs(T* to, T value) {
    emulation::move<T>(to, &value, to);
}
