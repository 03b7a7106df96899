// Stands in for CUDA's header where the kernels are compiled for the host: each thread of a CTA is
// a fiber, and runtime.cpp says in which order they run and what orders memory.
//
// A thread runs until it meets a barrier (of the CTA or of its warp) and then lets the next one
// run, so that shared memory, votes, shuffles and tickets mean what they mean on a GPU. All threads
// must reach a barrier. Barriers and fences carry their place in the source, so that any of them
// can be taken out of a run without compiling again.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static thread_local  // no thread of the system runs two CTAs at once
#define __grid_constant__
#define __launch_bounds__(...)
#define __syncthreads() emulation::syncthreads(__FILE__, __LINE__)
#define __syncthreads_or(holds) emulation::syncthreads_or((holds) != 0, __FILE__, __LINE__)
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

// kernel<<<grid, threads>>>(...), with the call as `body`; threads is a multiple of 32. Returns
// when all CTAs have ended.
void launch(unsigned grid, unsigned threads, const std::function<void()>& body);
void syncthreads(const char* file, int line);
int syncthreads_or(bool holds, const char* file, int line);
void fence(const char* file, int line);
void pause();
int64_t nanoseconds();
// A thread is about to look at a word that other ranks write: what they do at this moment is up to
// `between_looks`, if there is one. Not to be set while a launch runs.
void before_look();
extern std::function<void()> between_looks;
// Every lane gives a value and gets that of lane `from`.
uint64_t exchange(uint64_t value, unsigned from);
unsigned ballot(bool holds);
unsigned atomic_inc(unsigned* address, unsigned last);

// A thread asked for bytes, or stored some. The most that any has asked for before it stored or
// waited, since this was last called.
void asked(size_t bytes);
void stored();
int64_t most_asked();

// In words or in bytes, through volatile, so that the access that a sanitizer sees is this one.
template <typename Word>
void copy(void* to, const void* from, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof(Word); ++i)
        static_cast<volatile Word*>(to)[i] = static_cast<const volatile Word*>(from)[i];
}

// Accesses of more than a byte must be in line, as on a GPU.
template <typename T>
void move(void* to, const void* from, const void* there) {
    if (reinterpret_cast<uintptr_t>(there) % sizeof(T)) {
        std::fprintf(stderr, "access of %zu bytes at %p is not in line\n", sizeof(T), there);
        std::abort();
    }
    using Word = std::conditional_t<sizeof(T) % 4 == 0, uint32_t,
                                    std::conditional_t<sizeof(T) == 2, uint16_t, unsigned char>>;
    copy<Word>(to, from, sizeof(T));
}

template <typename T>
T exchange_as(T value, unsigned from) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    bits = exchange(bits, from % 32);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace emulation

inline unsigned __ballot_sync(unsigned, bool holds) { return emulation::ballot(holds); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return emulation::exchange_as(value, threadIdx.x ^ static_cast<unsigned>(mask));
}
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
    return emulation::exchange_as(value, static_cast<unsigned>(lane));
}

inline void __syncwarp() {}  // lanes wait for each other in votes and shuffles alone

inline unsigned atomicInc(unsigned* address, unsigned last) {
    return emulation::atomic_inc(address, last);
}
inline double __longlong_as_double(long long bits) {
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

template <typename T>
T __ldcs(const T* from) {
    T value;
    emulation::move<T>(&value, from, from);
    emulation::asked(sizeof(T));
    return value;
}
template <typename T>
T __ldcg(const T* from) {
    return __ldcs(from);
}
template <typename T>
void __stcs(T* to, T value) {
    emulation::move<T>(to, &value, to);
    emulation::stored();
}
