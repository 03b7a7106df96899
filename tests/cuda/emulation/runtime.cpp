// The scheduler of the fibers of cuda_runtime.h, and what orders memory there. Never instrumented
// itself: under ThreadSanitizer it tells of each fiber and of each order by hand.
//
//   as it is           one CTA after the other, on the caller's thread
//   -DPYOPS_TSAN       the same, each CTA on a thread of its own, each fiber with a vector clock of
//                      its own: barriers order memory, shuffles and votes order nothing, a fence
//                      before an atomic releases and one after it acquires. What orders CTAs is
//                      told to ThreadSanitizer alone.
//   -DPYOPS_AT_ONCE    all CTAs of a launch at once, each on a thread: where ranks meet in a kernel
//
// WITHOUT=reduce.cuh:46 takes the barrier or fence at that line out: threads still wait for each
// other there, and no memory is ordered by it. COVERED=1 prints the barriers and fences that were
// met.
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cuda_runtime.h"

#ifdef PYOPS_TSAN
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
int __tsan_atomic32_compare_exchange_strong(volatile int*, int*, int, int, int);
}
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
static int __tsan_atomic32_compare_exchange_strong(volatile int* at, int* old, int value, int,
                                                   int) {
    return __atomic_compare_exchange_n(at, old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#endif

thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

namespace {

thread_local int64_t bytes_asked, most_bytes;

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
    char* pending = nullptr;  // the order of an atomic that a fence would acquire
    Barrier* at = nullptr;    // waits there for the next generation after `seen`
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
    char* end;  // of the kernel -> the host, and so the next kernel of this stream
};

// Those of one CTA after the other.
class Stacks {
public:
    char* of(unsigned threads) {
        if (threads <= threads_) return memory_;
        clear();
        threads_ = threads;
        memory_ = static_cast<char*>(mmap(nullptr, threads * STACK, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        return memory_;
    }
    ~Stacks() { clear(); }

private:
    char* memory_ = nullptr;
    unsigned threads_ = 0;
    void clear() {
        if (threads_) munmap(memory_, threads_ * STACK);
    }
};

thread_local Cta* cta = nullptr;
thread_local Stacks stacks;
char ticket_order[64];  // of atomics, one for some addresses

char* order_of(void* address) {
    return &ticket_order[(reinterpret_cast<uintptr_t>(address) >> 2) % 64];
}

const char* const without = getenv("WITHOUT");
const bool covered = getenv("COVERED");
const char* met_files[64];
int met_lines[64], met_count;

std::atomic_flag noting = ATOMIC_FLAG_INIT;
struct Held {
    Held() {
        while (noting.test_and_set(std::memory_order_acquire)) {
        }
    }
    ~Held() { noting.clear(std::memory_order_release); }
};

// What a place in the source is called; no function of the library, whose accesses would be seen.
bool is_called(const char* name, const char* file, int line) {
    for (const char* c = file; *c; ++c)
        if (*c == '/') file = c + 1;
    while (*file && *name == *file) ++name, ++file;
    if (*file || *name++ != ':') return false;
    int number = 0;
    while (*name >= '0' && *name <= '9') number = 10 * number + (*name++ - '0');
    return !*name && number == line;
}

// Whether what stands at this place orders memory.
bool orders(const char* file, int line) {
    if (covered) {
        const Held one_at_a_time;  // CTAs may run at once
        int i = 0;
        while (i < met_count && (met_files[i] != file || met_lines[i] != line)) ++i;
        if (i == met_count && i < 64) met_files[i] = file, met_lines[i] = line, ++met_count;
    }
    return !without || !is_called(without, file, line);
}

void yield() {
    Cta* here = cta;
    Fiber& me = here->fibers[here->current];
    __tsan_switch_to_fiber(here->scheduler_tsan, NO_SYNC);
    swapcontext(&me.context, &here->scheduler);
}

int wait(Barrier& barrier, int threads, bool ordering) {
    const int generation = barrier.generation;
    bytes_asked = 0;
    if (ordering) __tsan_release(&barrier.order[generation & 1]);
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
    if (ordering) __tsan_acquire(&barrier.order[generation & 1]);
    return generation;
}

void wait_for_warp() { wait(cta->warps[threadIdx.x / 32], 32, false); }

void fiber() {
    (*cta->body)();
    __tsan_release(cta->end);
    cta->fibers[cta->current].done = true;
    yield();
}

void run(Cta& here, unsigned grid, unsigned block, unsigned threads) {
    cta = &here;
    gridDim.x = grid;
    blockDim.x = threads;
    blockIdx.x = block;
    here.fibers.resize(threads);
    here.warps.resize(threads / 32);
    here.exchanged.resize(threads);
    here.scheduler_tsan = __tsan_get_current_fiber();
    char* const memory = stacks.of(threads);
    for (unsigned t = 0; t < threads; ++t) {
        Fiber& f = here.fibers[t];
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = memory + t * STACK;
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
    cta = nullptr;
}

}  // namespace

void syncthreads(const char* file, int line) {
    wait(cta->all, static_cast<int>(blockDim.x), orders(file, line));
}

int syncthreads_or(bool holds, const char* file, int line) {
    if (holds) cta->holds_in = cta->all.generation;
    const int generation = wait(cta->all, static_cast<int>(blockDim.x), orders(file, line));
    const bool any = cta->holds_in == generation;
    wait(cta->all, static_cast<int>(blockDim.x), false);  // all have read it
    return any;
}

void fence(const char* file, int line) {
    if (!orders(file, line)) return;
    Fiber& me = cta->fibers[cta->current];
    me.fenced = true;
    if (me.pending) __tsan_acquire(me.pending);
    me.pending = nullptr;
}

// Relaxed, as on a GPU, where only the fences around it order; seen by ThreadSanitizer as the
// atomic that it is, so that a plain access to any of its bytes is a race.
unsigned atomic_inc(unsigned* address, unsigned last) {
    Fiber& me = cta->fibers[cta->current];
    if (me.fenced) __tsan_release(order_of(address));
    me.fenced = false;
    me.pending = order_of(address);
    auto* const word = reinterpret_cast<volatile int*>(address);
    int old = __atomic_load_n(word, __ATOMIC_RELAXED);
    while (!__tsan_atomic32_compare_exchange_strong(
        word, &old,
        static_cast<unsigned>(old) >= last ? 0 : static_cast<int>(static_cast<unsigned>(old) + 1),
        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return static_cast<unsigned>(old);
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

void asked(size_t bytes) {
    bytes_asked += static_cast<int64_t>(bytes);
    if (bytes_asked > most_bytes) most_bytes = bytes_asked;
}

void stored() { bytes_asked = 0; }

int64_t most_asked() {
    const int64_t most = most_bytes;
    bytes_asked = most_bytes = 0;
    return most;
}

void pause() {
    std::this_thread::yield();
    yield();
}

std::function<void()> between_looks;

void before_look() {
    if (between_looks) between_looks();
}

int64_t nanoseconds() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void launch(unsigned grid, unsigned threads, const std::function<void()>& body) {
    static thread_local char end;
    // Fibers live to the end of the launch: ThreadSanitizer takes a number that is used again for
    // the same thread.
    std::vector<std::unique_ptr<Cta>> ctas;
    std::vector<std::thread> running;
    for (unsigned block = 0; block < grid; ++block) {
        ctas.emplace_back(new Cta);
        Cta& here = *ctas.back();
        here.body = &body;
        here.end = &end;
        const auto one = [&here, grid, block, threads] { run(here, grid, block, threads); };
#if defined(PYOPS_AT_ONCE)
        running.emplace_back(one);
#elif defined(PYOPS_TSAN)
        std::thread(one).join();
#else
        one();
#endif
    }
    for (std::thread& thread : running) thread.join();
    for (auto& here : ctas)
        for (Fiber& f : here->fibers) __tsan_destroy_fiber(f.tsan);
    __tsan_acquire(&end);
}

namespace {

struct AtTheEnd {
    ~AtTheEnd() {
        for (int i = 0; i < met_count; ++i) {
            const char* slash = strrchr(met_files[i], '/');
            std::printf("met %s:%d\n", slash ? slash + 1 : met_files[i], met_lines[i]);
        }
    }
} at_the_end;

}  // namespace
}  // namespace emulation
