// Memory that several GPUs see: single words that order what lies around them, at system scope.
//
//   store_release    whatever this thread did, or has seen, before  ->  the word
//   load_acquire     the word  ->  whatever this thread does after
//
// Without nvcc they are the compiler's own atomics, which ThreadSanitizer understands.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pyops::cuda {

#if defined(__CUDACC__)

__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
    asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

// `value` into a word that is 0; whoever comes later changes nothing.
__device__ __forceinline__ void store_first(uint32_t* word, uint32_t value) {
    atomicCAS_system(word, 0u, value);
}

__device__ __forceinline__ int64_t nanoseconds() {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Between two looks at a word: leaves the memory system to those that work.
__device__ __forceinline__ void pause() { __nanosleep(40); }

#else

inline void store_release(uint32_t* word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

inline uint32_t load_acquire(const uint32_t* word) {
    emulation::before_look();
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

inline void store_first(uint32_t* word, uint32_t value) {
    uint32_t expected = 0;
    __atomic_compare_exchange_n(word, &expected, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

inline int64_t nanoseconds() { return emulation::nanoseconds(); }
inline void pause() { emulation::pause(); }

#endif

}  // namespace pyops::cuda
