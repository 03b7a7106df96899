// Stands in for CUDA's header where ranks meet within a kernel: the CTAs of all ranks run at once, each on a thread of the
// system, its CUDA threads as fibers. Under ThreadSanitizer every fiber has a clock of its own; barriers order, shuffles order
// nothing, a fence and an atomic order as on a GPU. Rounding and 16-bit types are those of tests/cuda/emulation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)

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

extern thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

// kernel<<<grid, threads>>>(...), with the call as `body`; returns when all CTAs have ended.
void launch(unsigned grid, unsigned threads, const std::function<void()>& body);
void syncthreads();
bool syncthreads_or(bool);
void fence();
void pause();
int64_t nanoseconds();
uint64_t exchange(uint64_t value, unsigned from);
unsigned ballot(bool);
unsigned atomic_inc(unsigned* address, unsigned last);

}  // namespace emulation

inline void __syncthreads() { emulation::syncthreads(); }
inline int __syncthreads_or(int holds) { return emulation::syncthreads_or(holds != 0); }
inline void __threadfence() { emulation::fence(); }
inline unsigned __ballot_sync(unsigned, bool holds) { return emulation::ballot(holds); }

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = emulation::exchange(bits, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned atomicInc(unsigned* address, unsigned last) { return emulation::atomic_inc(address, last); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

// Accesses of more than a byte must be in line, as on a GPU. Through volatile, so that the accesses that a sanitizer sees are these.
[[noreturn]] inline void misaligned(const void* address, size_t size) {
  std::fprintf(stderr, "access of %zu bytes at %p is not in line\n", size, address);
  std::abort();
}
template <typename T>
T __ldcs(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) misaligned(from, sizeof(T));
  using Word = std::conditional_t<sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  Word words[sizeof(T) / sizeof(Word)];
  for (size_t i = 0; i < sizeof(T) / sizeof(Word); ++i) words[i] = reinterpret_cast<const volatile Word*>(from)[i];
  T value;
  std::memcpy(&value, words, sizeof value);
  return value;
}
template <typename T>
T __ldcg(const T* from) {
  return __ldcs(from);
}
template <typename T>
void __stcs(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) misaligned(to, sizeof(T));
  using Word = std::conditional_t<sizeof(T) % 4 == 0, uint32_t, uint16_t>;
  Word words[sizeof(T) / sizeof(Word)];
  std::memcpy(words, &value, sizeof value);
  for (size_t i = 0; i < sizeof(T) / sizeof(Word); ++i) reinterpret_cast<volatile Word*>(to)[i] = words[i];
}
