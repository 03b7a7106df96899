// Not instrumented: the scheduler of fibers, and what orders memory.
//
// WITHOUT=reduce.cuh:46 takes the barrier or fence at that line out: threads still wait for each
// other there, and no memory is ordered by it. COVERED=1 prints the barriers and fences that were
// met.
#include <sys/mman.h>
#include <ucontext.h>

#include <thread>

#include "cuda_runtime.h"

extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned);
void __tsan_destroy_fiber(void*);
void __tsan_switch_to_fiber(void*, unsigned);
void __tsan_acquire(void*);
void __tsan_release(void*);
}

thread_local dim3 threadIdx, blockIdx, gridDim, blockDim;

namespace emulation {

constexpr size_t STACK = 96 << 10;
constexpr unsigned NO_SYNC = 1;

static char stream_order;      // the end of a kernel -> the host, and so the next kernel
static char ticket_order[64];  // of atomics, one for each hashed address
static char* order_of(void* p) { return &ticket_order[(reinterpret_cast<uintptr_t>(p) >> 2) % 64]; }

struct Barrier {
    int arrived = 0, generation = 0;
    char order[2];
};

struct Fiber {
    ucontext_t context;
    void* tsan;
    bool done = false, fenced = false;
    char* pending = nullptr;  // the order of an atomic that a fence would acquire
};

struct Cta {
    std::vector<Fiber> fibers;
    ucontext_t scheduler;
    void* scheduler_tsan;
    unsigned current = 0;
    Barrier all;
    std::vector<Barrier> warps;
    std::vector<uint64_t> exchanged;
    const std::function<void()>* body;
};

static thread_local Cta* cta;


static const char* met_files[64];
static int met_lines[64], met_count;

// What a place in the source is called; no function of the library, whose accesses would be seen.
static bool is_called(const char* name, const char* file, int line) {
    for (const char* c = file; *c; ++c)
        if (*c == '/') file = c + 1;
    while (*file && *name == *file) ++name, ++file;
    if (*file || *name++ != ':') return false;
    int number = 0;
    while (*name >= '0' && *name <= '9') number = 10 * number + (*name++ - '0');
    return !*name && number == line;
}

static const char* const without = getenv("WITHOUT");
static const bool covered = getenv("COVERED");

// Whether what stands at this place orders memory.
static bool orders(const char* file, int line) {
    if (covered) {
        int i = 0;
        while (i < met_count && (met_files[i] != file || met_lines[i] != line)) ++i;
        if (i == met_count && i < 64) met_files[i] = file, met_lines[i] = line, ++met_count;
    }
    return !without || !is_called(without, file, line);
}

static void yield() {
    Cta* c = cta;
    Fiber& me = c->fibers[c->current];
    __tsan_switch_to_fiber(c->scheduler_tsan, NO_SYNC);
    swapcontext(&me.context, &c->scheduler);
}

static void wait(Barrier& b, int threads, bool ordering) {
    const int generation = b.generation;
    if (ordering) __tsan_release(&b.order[generation & 1]);
    if (++b.arrived == threads) {
        b.arrived = 0;
        ++b.generation;
    } else {
        while (b.generation == generation) yield();
    }
    if (ordering) __tsan_acquire(&b.order[generation & 1]);
}

void syncthreads(const char* file, int line) {
    wait(cta->all, static_cast<int>(blockDim.x), orders(file, line));
}

static void warp() { wait(cta->warps[threadIdx.x / 32], 32, false); }

void fence(const char* file, int line) {
    if (!orders(file, line)) return;
    Fiber& f = cta->fibers[cta->current];
    f.fenced = true;
    if (f.pending) {
        __tsan_acquire(f.pending);
        f.pending = nullptr;
    }
}

unsigned atomic_inc(unsigned* address, unsigned last) {
    Fiber& f = cta->fibers[cta->current];
    if (f.fenced) __tsan_release(order_of(address));
    f.fenced = false;
    f.pending = order_of(address);
    const unsigned old = *address;
    *address = old >= last ? 0 : old + 1;
    return old;
}

uint64_t exchange(uint64_t value, unsigned from) {
    const unsigned base = threadIdx.x / 32 * 32;
    cta->exchanged[threadIdx.x] = value;
    warp();
    const uint64_t got = cta->exchanged[base + from];
    warp();
    return got;
}

unsigned ballot(bool holds) {
    const unsigned base = threadIdx.x / 32 * 32;
    cta->exchanged[threadIdx.x] = holds;
    warp();
    unsigned bits = 0;
    for (unsigned k = 0; k < 32; ++k)
        bits |= static_cast<unsigned>(cta->exchanged[base + k]) << k;
    warp();
    return bits;
}

static void fiber() {
    (*cta->body)();
    __tsan_release(&stream_order);
    cta->fibers[cta->current].done = true;
    yield();
}

static void run(Cta& here, unsigned grid, unsigned block, unsigned threads) {
    here.fibers.resize(threads);
    here.warps.resize(threads / 32);
    here.exchanged.resize(threads);
    here.scheduler_tsan = __tsan_get_current_fiber();
    cta = &here;
    gridDim.x = grid;
    blockDim.x = threads;
    blockIdx.x = block;
    for (Fiber& f : here.fibers) {
        void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stack;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber, 0);
        f.tsan = __tsan_create_fiber(0);
    }
    for (unsigned left = threads; left > 0;)
        for (unsigned t = 0; t < threads; ++t) {
            Fiber& f = here.fibers[t];
            if (f.done) continue;
            here.current = threadIdx.x = t;
            __tsan_switch_to_fiber(f.tsan, NO_SYNC);
            swapcontext(&here.scheduler, &f.context);
            left -= f.done;
        }
    cta = nullptr;
}

// One CTA after the other: what orders them is told to ThreadSanitizer alone.
void launch(unsigned grid, unsigned threads, const std::function<void()>& body) {
    // Fibers live to the end of the launch: a number that is used again is taken for the same one.
    std::vector<std::unique_ptr<Cta>> all;
    for (unsigned block = 0; block < grid; ++block) {
        all.emplace_back(new Cta);
        all.back()->body = &body;
        std::thread([&, block] { run(*all.back(), grid, block, threads); }).join();
    }
    for (auto& c : all)
        for (Fiber& f : c->fibers) {
            __tsan_destroy_fiber(f.tsan);
            munmap(f.context.uc_stack.ss_sp, STACK);
        }
    __tsan_acquire(&stream_order);
}

static struct AtTheEnd {
    ~AtTheEnd() {
        for (int i = 0; i < met_count; ++i) {
            const char* slash = strrchr(met_files[i], '/');
            std::printf("met %s:%d\n", slash ? slash + 1 : met_files[i], met_lines[i]);
        }
    }
} at_the_end;

}  // namespace emulation
