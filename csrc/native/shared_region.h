// A stretch of POSIX shared memory among the ranks of one host, with counters to wait on: what the
// collectives are made of.
//
//     | failed | control[0] | control[1] | ... | small slots | in slots | result slots |
//
// Each rank writes only its own control block and slots (and `failed`). Its three counters only
// grow: collective number q, chunk k stands as (q << CHUNK_BITS) + k + 1, and a finished collective
// as ((q + 1) << CHUNK_BITS). A rank that waits spins for a moment, yields, then sleeps on a futex,
// and looks every few milliseconds whether its peer is alive.
#pragma once
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pyops {

constexpr int MAX_RANKS = 64;
constexpr int CHUNK_BITS = 24;
constexpr int SIGNATURE_WORDS = 4;

// How a collective ended, and the rank that is to blame; packed as code + 256 * rank for Python.
enum Code { OK = 0, MISMATCH = 1, DIED = 2, STALLED = 3 };
struct Status {
    int code = OK, rank = 0;
    bool ok() const { return code == OK; }
    int packed() const { return code + 256 * rank; }
};

struct alignas(128) Control {
    // Chunks whose input is in its slot / that are summed / copied out
    std::atomic<uint64_t> in, sum, out;
    std::atomic<uint32_t> epoch;  // grows with every post: the word that sleepers watch
    std::atomic<uint32_t> sleepers;
    alignas(128) int64_t pid;
    uint64_t start_time;
    uint64_t signatures[2][SIGNATURE_WORDS];  // of the even and of the odd collectives
};
using Counter = std::atomic<uint64_t> Control::*;

struct alignas(128) Header {
    std::atomic<uint32_t> failed;  // 0, or the packed status that ended this group
    Control control[MAX_RANKS];
};

// When a process started, in clock ticks since boot; 0 if there is no such process or it is a
// zombie. With the pid it names a process for good, because pids are used again.
inline uint64_t process_start(int64_t pid) {
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
    FILE* file = std::fopen(path, "r");
    if (!file) return 0;
    const size_t length = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[length] = 0;
    // The command's name may hold anything, a parenthesis too
    const char* field = std::strrchr(text, ')');
    if (!field || field[1] == 0 || field[2] == 'Z' || field[2] == 'X') return 0;
    for (int number = 2; number < 22 && field; ++number) field = std::strchr(field + 1, ' ');
    return field ? std::strtoull(field, nullptr, 10) : 0;
}

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Region {
public:
    Region(const std::string& name, int rank, int size, bool create, size_t bytes)
        : rank(rank), size(size), name_(name) {
        if (size < 1 || size > MAX_RANKS || rank < 0 || rank >= size)
            throw std::invalid_argument("rank " + std::to_string(rank) + " of " +
                                        std::to_string(size) + ": shared memory serves 1 to " +
                                        std::to_string(MAX_RANKS) + " ranks");
        length_ = sizeof(Header) + bytes;
        const int file = shm_open(name.c_str(), create ? O_RDWR | O_CREAT | O_EXCL : O_RDWR, 0600);
        if (file < 0) fail("shm_open");
        // Without space now, a write later would be a bus error.
        const int error = create ? posix_fallocate(file, 0, static_cast<off_t>(length_)) : 0;
        if (error) {
            close(file);
            shm_unlink(name.c_str());
            errno = error;
            fail("posix_fallocate of " + std::to_string(length_) + " bytes");
        }
        void* memory = mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (memory == MAP_FAILED) {
            const int reason = errno;
            if (create) shm_unlink(name.c_str());
            errno = reason;
            fail("mmap");
        }
        // Fresh shared memory is zero, and so are all counters
        header_ = static_cast<Header*>(memory);
        mine().pid = getpid();
        mine().start_time = process_start(getpid());
    }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() { munmap(header_, length_); }

    // Once every rank has mapped it the name can go: nothing is left behind even by a crash.
    void unlink() { shm_unlink(name_.c_str()); }

    char* memory() { return reinterpret_cast<char*>(header_ + 1); }
    Control& control(int peer) { return header_->control[peer]; }
    Control& mine() { return header_->control[rank]; }

    void post(Counter counter, uint64_t value) {
        (mine().*counter).store(value, std::memory_order_release);
        wake(mine());
    }

    // All three counters at once: this rank is through with a collective.
    void post_done(uint64_t value) {
        for (Counter counter : {&Control::in, &Control::sum, &Control::out})
            (mine().*counter).store(value, std::memory_order_release);
        wake(mine());
    }

    // Until every peer's counter has reached `value`.
    Status wait(Counter counter, uint64_t value) {
        for (int i = 1; i < size; ++i) {
            const int peer = (rank + i) % size;
            if ((control(peer).*counter).load(std::memory_order_acquire) >= value) continue;
            const Status status = wait_for(peer, counter, value);
            if (!status.ok()) return status;
        }
        return {};
    }

    Status failed() const {
        const int packed = static_cast<int>(header_->failed.load(std::memory_order_acquire));
        return {packed % 256, packed / 256};
    }

    const int rank, size;
    int spins = 64;  // tries with a pause before the first yield: about a microsecond
    // Yield for a while before sleeping; not beside a computing thread, which would run for its
    // whole slice
    bool yields = true;
    double timeout = 60.0;  // seconds

private:
    [[noreturn]] void fail(const std::string& what) {
        throw std::runtime_error("shared memory " + name_ + ": " + what + ": " +
                                 std::strerror(errno));
    }

    static void wake(Control& control) {
        control.epoch.fetch_add(1, std::memory_order_seq_cst);
        if (control.sleepers.load(std::memory_order_seq_cst))
            syscall(SYS_futex, &control.epoch, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // The first failure stands; every rank that waits, or comes later, ends with it.
    Status give_up(Status status) {
        uint32_t none = 0;
        header_->failed.compare_exchange_strong(none, static_cast<uint32_t>(status.packed()),
                                                std::memory_order_acq_rel);
        for (int peer = 0; peer < size; ++peer) wake(control(peer));
        return failed();
    }

    Status wait_for(int peer, Counter counter, uint64_t value) {
        Control& other = control(peer);
        const auto reached = [&] {
            return (other.*counter).load(std::memory_order_acquire) >= value;
        };
        for (int i = 0; i < spins; ++i) {
            if (reached()) return {};
            pause_cpu();
        }
        const auto start = std::chrono::steady_clock::now();
        const auto waited = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        };
        // The peer may be waiting for this very processor. When others take it too, a sleeper is
        // back sooner than who yields.
        while (yields && waited() < 50e-6) {
            if (reached()) return {};
            sched_yield();
        }
        while (!reached()) {
            if (!failed().ok()) return failed();
            other.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint32_t epoch = other.epoch.load(std::memory_order_seq_cst);
            if (!reached() && failed().ok()) {
                const timespec slice{0, 20'000'000};
                syscall(SYS_futex, &other.epoch, FUTEX_WAIT, epoch, &slice, nullptr, 0);
            }
            other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
            if (waited() < 0.02 || reached()) continue;
            if (process_start(other.pid) != other.start_time) return give_up({DIED, peer});
            if (waited() > timeout) return give_up({STALLED, peer});
        }
        return {};
    }

    std::string name_;
    size_t length_ = 0;
    Header* header_ = nullptr;
};

}  // namespace pyops
