// Stands in for CUDA's header where the kernels are compiled for the host: one CTA after another, its threads as fibers.
//
// A thread runs until it meets a barrier (of the CTA or of its warp) and then lets the next one run, so that shared memory,
// votes, shuffles and tickets mean what they mean on a GPU; races between CTAs don't show. All threads must reach a barrier.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
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

inline dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

constexpr size_t STACK = 128 << 10;

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Cta {
  std::vector<ucontext_t> fibers;
  std::vector<char> done;
  ucontext_t scheduler;
  unsigned current = 0;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> exchanged;
  std::function<void()> body;
};

inline Cta* cta = nullptr;

inline void yield() {
  const unsigned me = cta->current;
  swapcontext(&cta->fibers[me], &cta->scheduler);
}

inline void wait(Barrier& barrier, int threads) {
  const int generation = barrier.generation;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

inline void wait_for_warp() { wait(cta->warps[threadIdx.x / 32], 32); }

// Every lane gives a value and gets that of lane `from`.
inline uint64_t exchange(uint64_t value, unsigned from) {
  const unsigned warp = threadIdx.x / 32 * 32;
  cta->exchanged[threadIdx.x] = value;
  wait_for_warp();
  const uint64_t received = cta->exchanged[warp + from];
  wait_for_warp();
  return received;
}

inline void fiber() {
  cta->body();
  cta->done[cta->current] = 1;
  yield();
}

// kernel<<<grid, threads>>>(...), with the call as `body`; threads is a multiple of 32.
inline void launch(unsigned grid, unsigned threads, const std::function<void()>& body) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() < threads) stacks.emplace_back(new char[STACK]);
  gridDim.x = grid;
  blockDim.x = threads;
  for (unsigned block = 0; block < grid; ++block) {
    Cta here;
    here.fibers.resize(threads);
    here.done.assign(threads, 0);
    here.warps.resize(threads / 32);
    here.exchanged.resize(threads);
    here.body = body;
    cta = &here;
    blockIdx.x = block;
    for (unsigned t = 0; t < threads; ++t) {
      getcontext(&here.fibers[t]);
      here.fibers[t].uc_stack.ss_sp = stacks[t].get();
      here.fibers[t].uc_stack.ss_size = STACK;
      here.fibers[t].uc_link = nullptr;
      makecontext(&here.fibers[t], fiber, 0);
    }
    for (unsigned left = threads; left > 0;)
      for (unsigned t = 0; t < threads; ++t) {
        if (here.done[t]) continue;
        here.current = threadIdx.x = t;
        swapcontext(&here.scheduler, &here.fibers[t]);
        left -= here.done[t];
      }
  }
  cta = nullptr;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait(emulation::cta->all, static_cast<int>(blockDim.x)); }
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned, bool holds) {
  unsigned bits = 0;
  const unsigned lane = threadIdx.x % 32;
  emulation::cta->exchanged[threadIdx.x] = holds;
  emulation::wait_for_warp();
  for (unsigned other = 0; other < 32; ++other) bits |= static_cast<unsigned>(emulation::cta->exchanged[threadIdx.x - lane + other]) << other;
  emulation::wait_for_warp();
  return bits;
}

template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = emulation::exchange(bits, (threadIdx.x % 32) ^ static_cast<unsigned>(mask));
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline unsigned atomicInc(unsigned* address, unsigned last) {
  const unsigned old = *address;
  *address = old >= last ? 0 : old + 1;
  return old;
}

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>(((static_cast<uint64_t>(high) << 32) | low) >> (shift & 31));
}

// Accesses of more than a byte must be in line, as on a GPU.
[[noreturn]] inline void misaligned(const void* address, size_t size) {
  std::fprintf(stderr, "access of %zu bytes at %p is not in line\n", size, address);
  std::abort();
}
template <typename T>
T __ldcs(const T* from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T)) misaligned(from, sizeof(T));
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename T>
T __ldcg(const T* from) {
  return __ldcs(from);
}
template <typename T>
void __stcs(T* to, T value) {
  if (reinterpret_cast<uintptr_t>(to) % sizeof(T)) misaligned(to, sizeof(T));
  std::memcpy(to, &value, sizeof value);
}
