// The scheduler of tests/cuda/symmetric/emulation/cuda_runtime.h, and what orders memory there. Never instrumented itself: under
// ThreadSanitizer (-DPYOPS_TSAN) it tells of each fiber and of each order by hand.
#include <sys/mman.h>
#include <ucontext.h>

#include <chrono>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "cuda_runtime.h"

#ifdef PYOPS_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {
namespace {

constexpr size_t STACK = 128 << 10;
constexpr unsigned NO_SYNC = 1;

struct Barrier {
  int arrived = 0, generation = 0;
  char order[2];
};

struct Fiber {
  ucontext_t context;
  void* tsan;
  bool done = false, fenced = false;
  char* pending = nullptr;
  Barrier* at = nullptr;  // waits there for the next generation after `seen`
  int seen = 0;
};

struct Cta {
  std::vector<Fiber> fibers;
  ucontext_t scheduler;
  void* scheduler_tsan;
  unsigned current = 0;
  Barrier all;
  std::vector<Barrier> warps;
  std::vector<uint64_t> exchanged;
  int holds_in = -1;  // the generation of `all` in which a thread held
  const std::function<void()>* body;
  char* end;  // of the kernel
};

thread_local Cta* cta = nullptr;
char ticket_order[64];  // of atomics, one for some addresses

char* order_of(void* address) { return &ticket_order[(reinterpret_cast<uintptr_t>(address) >> 2) % 64]; }

void yield() {
  Cta* here = cta;
  Fiber& me = here->fibers[here->current];
  __tsan_switch_to_fiber(here->scheduler_tsan, NO_SYNC);
  swapcontext(&me.context, &here->scheduler);
}

int wait(Barrier& barrier, int threads, bool orders) {
  const int generation = barrier.generation;
  if (orders) __tsan_release(&barrier.order[generation & 1]);
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.generation;
  } else {
    Fiber& me = cta->fibers[cta->current];
    me.at = &barrier;
    me.seen = generation;
    while (barrier.generation == generation) yield();
    me.at = nullptr;
  }
  if (orders) __tsan_acquire(&barrier.order[generation & 1]);
  return generation;
}

void wait_for_warp() { wait(cta->warps[threadIdx.x / 32], 32, false); }

void fiber() {
  (*cta->body)();
  __tsan_release(cta->end);
  cta->fibers[cta->current].done = true;
  yield();
}

void run_cta(Cta& here, unsigned grid, unsigned block, unsigned threads) {
  cta = &here;
  gridDim.x = grid;
  blockDim.x = threads;
  blockIdx.x = block;
  here.scheduler_tsan = __tsan_get_current_fiber();
  char* stacks = static_cast<char*>(mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& f = here.fibers[t];
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks + t * STACK;
    f.context.uc_stack.ss_size = STACK;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber, 0);
    f.tsan = __tsan_create_fiber(0);
  }
  for (unsigned left = threads; left > 0;)
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& f = here.fibers[t];
      if (f.done || (f.at != nullptr && f.at->generation == f.seen)) continue;
      here.current = threadIdx.x = t;
      __tsan_switch_to_fiber(f.tsan, NO_SYNC);
      swapcontext(&here.scheduler, &f.context);
      left -= f.done;
    }
  munmap(stacks, threads * STACK);
  cta = nullptr;
}

}  // namespace

void syncthreads() { wait(cta->all, static_cast<int>(blockDim.x), true); }

bool syncthreads_or(bool holds) {
  if (holds) cta->holds_in = cta->all.generation;
  const int generation = wait(cta->all, static_cast<int>(blockDim.x), true);
  const bool any = cta->holds_in == generation;
  wait(cta->all, static_cast<int>(blockDim.x), false);  // all have read it
  return any;
}

void fence() {
  Fiber& me = cta->fibers[cta->current];
  me.fenced = true;
  if (me.pending) __tsan_acquire(me.pending);
  me.pending = nullptr;
}

unsigned atomic_inc(unsigned* address, unsigned last) {
  Fiber& me = cta->fibers[cta->current];
  if (me.fenced) __tsan_release(order_of(address));
  me.fenced = false;
  me.pending = order_of(address);
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, old >= last ? 0 : old + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

uint64_t exchange(uint64_t value, unsigned from) {
  const unsigned warp = threadIdx.x / 32 * 32;
  cta->exchanged[threadIdx.x] = value;
  wait_for_warp();
  const uint64_t received = cta->exchanged[warp + from];
  wait_for_warp();
  return received;
}

unsigned ballot(bool holds) {
  const unsigned warp = threadIdx.x / 32 * 32;
  cta->exchanged[threadIdx.x] = holds;
  wait_for_warp();
  unsigned bits = 0;
  for (unsigned k = 0; k < 32; ++k) bits |= static_cast<unsigned>(cta->exchanged[warp + k]) << k;
  wait_for_warp();
  return bits;
}

void pause() {
  std::this_thread::yield();
  yield();
}

int64_t nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void launch(unsigned grid, unsigned threads, const std::function<void()>& body) {
  static thread_local char end;
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<std::thread> running;
  for (unsigned block = 0; block < grid; ++block) {
    ctas.emplace_back(new Cta);
    Cta& here = *ctas.back();
    here.fibers.resize(threads);
    here.warps.resize(threads / 32);
    here.exchanged.resize(threads);
    here.body = &body;
    here.end = &end;
    running.emplace_back([&here, grid, block, threads] { run_cta(here, grid, block, threads); });
  }
  for (std::thread& thread : running) thread.join();
  // Only now: ThreadSanitizer takes a number that is used again for the same thread.
  for (auto& here : ctas)
    for (Fiber& f : here->fibers) __tsan_destroy_fiber(f.tsan);
  __tsan_acquire(&end);
}

}  // namespace emulation
