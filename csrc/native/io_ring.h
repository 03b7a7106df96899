// The engine over io_uring, by raw system calls: one thread keeps up to `depth` pieces in the
// kernel's hands.
//
//     submit() -> queue -> [thread: fills the submission ring, sleeps in io_uring_enter,
//                           reads the completion ring] -> request
//                  eventfd --- a read of it lies in the ring, so that a new piece ends the sleep
//
// Axboe, "Efficient IO with io_uring" (kernel.dk/io_uring.pdf). Needs Linux 5.6 (IORING_OP_READ,
// IORING_OP_WRITE); a container's seccomp profile or /proc/sys/kernel/io_uring_disabled may refuse
// it, which is found out by asking.
#pragma once
#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#define PYOPS_IO_URING 1
#include <linux/io_uring.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <system_error>
#include <thread>

#include "file_transfer.h"

namespace pyops {

// The kernel refused `what`: its errno is the error's code.
inline std::system_error refusal(int number, const char* what) {
    return std::system_error(number, std::generic_category(), what);
}

// The two rings that a process shares with the kernel. Each has one writer of its tail and one of
// its head, so no lock is needed: what a ring's entries hold is published by a release store of the
// index after them, and read after an acquire load of that index.
class IoUring {
public:
    // Throws std::system_error with the errno of the kernel's refusal.
    explicit IoUring(unsigned entries) {
        io_uring_params params{};
        fd_ = static_cast<int>(syscall(SYS_io_uring_setup, entries, &params));
        if (fd_ < 0) throw refusal(errno, "io_uring_setup");
        // All of 5.6
        const unsigned needed =
            IORING_FEAT_RW_CUR_POS | IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP;
        if ((params.features & needed) != needed) {
            close(fd_);
            throw refusal(ENOSYS, "io_uring of Linux 5.6");
        }
        ring_bytes_ = std::max(params.sq_off.array + params.sq_entries * sizeof(unsigned),
                               params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
        sqe_bytes_ = params.sq_entries * sizeof(io_uring_sqe);
        ring_ = map(ring_bytes_, IORING_OFF_SQ_RING);
        sqes_ = reinterpret_cast<io_uring_sqe*>(map(sqe_bytes_, IORING_OFF_SQES));
        sq_tail_ = at(params.sq_off.tail);
        sq_mask_ = *at(params.sq_off.ring_mask);
        sq_array_ = at(params.sq_off.array);
        cq_head_ = at(params.cq_off.head);
        cq_tail_ = at(params.cq_off.tail);
        cq_mask_ = *at(params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(ring_ + params.cq_off.cqes);
    }
    IoUring(const IoUring&) = delete;
    IoUring& operator=(const IoUring&) = delete;
    ~IoUring() {
        munmap(sqes_, sqe_bytes_);
        munmap(ring_, ring_bytes_);
        close(fd_);
    }

    // The caller never has more in flight than the ring has entries.
    void prepare(bool write, int fd, char* memory, int64_t bytes, int64_t offset, uint64_t tag) {
        const unsigned tail = *sq_tail_, index = tail & sq_mask_;
        io_uring_sqe& sqe = sqes_[index];
        std::memset(&sqe, 0, sizeof sqe);
        sqe.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
        sqe.fd = fd;
        sqe.addr = reinterpret_cast<uint64_t>(memory);
        sqe.len = static_cast<uint32_t>(bytes);
        sqe.off = static_cast<uint64_t>(offset);
        sqe.user_data = tag;
        sq_array_[index] = index;
        // Release: the kernel, which reads the tail first, must then see the entry written above.
        __atomic_store_n(sq_tail_, tail + 1, __ATOMIC_RELEASE);
        ++unsubmitted_;
    }

    // Hands over what was prepared and sleeps until something is complete. 0 or errno.
    int enter() {
        const long taken =
            syscall(SYS_io_uring_enter, fd_, unsubmitted_, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (taken < 0) return errno == EINTR || errno == EAGAIN || errno == EBUSY ? 0 : errno;
        unsubmitted_ -= static_cast<unsigned>(taken);
        return 0;
    }

    bool next(uint64_t* tag, int64_t* answer) {
        const unsigned head = *cq_head_;
        // Acquire: pairs with the kernel's release of the tail, after which the entry is whole.
        if (head == __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) return false;
        const io_uring_cqe& cqe = cqes_[head & cq_mask_];
        *tag = cqe.user_data;
        *answer = cqe.res;
        // Release: only now may the kernel write over the entry, which was copied above.
        __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
        return true;
    }

private:
    char* map(size_t bytes, off_t what) {
        void* found =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, what);
        if (found != MAP_FAILED) return static_cast<char*>(found);
        const int reason = errno;
        if (ring_) munmap(ring_, ring_bytes_);
        close(fd_);
        throw refusal(reason, "mmap of the rings");
    }
    unsigned* at(unsigned offset) const { return reinterpret_cast<unsigned*>(ring_ + offset); }

    int fd_ = -1;
    unsigned unsubmitted_ = 0, sq_mask_ = 0, cq_mask_ = 0;
    size_t ring_bytes_ = 0, sqe_bytes_ = 0;
    char* ring_ = nullptr;
    io_uring_sqe* sqes_ = nullptr;
    unsigned *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    io_uring_cqe* cqes_ = nullptr;
};

class IoUringEngine : public Engine {
public:
    explicit IoUringEngine(int depth) : ring_(static_cast<unsigned>(depth) + 1), slots_(depth) {
        for (int i = 0; i < depth; ++i) free_.push_back(i);
        wake_fd_ = eventfd(0, EFD_CLOEXEC);
        if (wake_fd_ < 0) throw refusal(errno, "eventfd");
        thread_ = std::thread([this] { run(); });
    }
    ~IoUringEngine() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        wake();
        thread_.join();
        close(wake_fd_);
    }
    const char* name() const override { return "io_uring"; }

protected:
    void wake() override {
        const uint64_t one = 1;
        while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

private:
    static constexpr uint64_t WAKE = ~uint64_t{0};
    static constexpr size_t MAX_BOUNCES = 8;

    void run() {
        ring_.prepare(false, wake_fd_, reinterpret_cast<char*>(&woken_), sizeof woken_, 0, WAKE);
        for (;;) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                while (!queue_.empty() && !free_.empty() && take()) {
                }
                if (stopping_ && queue_.empty() && free_.size() == slots_.size()) return;
            }
            for (int slot : fresh_) start(slot);
            fresh_.clear();
            const int error = ring_.enter();
            uint64_t tag;
            int64_t answer;
            while (ring_.next(&tag, &answer)) {
                if (tag == WAKE)
                    ring_.prepare(false, wake_fd_, reinterpret_cast<char*>(&woken_), sizeof woken_,
                                  0, WAKE);
                else
                    completed(static_cast<int>(tag), answer);
            }
            if (error) fail_all(error);
        }
    }

    // The first piece of the queue into a free slot; false when it needs a bounce buffer and all
    // are in use.
    bool take() {
        Piece& first = queue_.front();
        if (first.bounced) {
            if (bounces_.empty() && num_bounces_ == MAX_BOUNCES) return false;
            if (bounces_.empty()) {
                bounces_.push_back(std::make_unique<BounceBuffer>());
                ++num_bounces_;
            }
        }
        const int slot = free_.back();
        free_.pop_back();
        slots_[slot].piece = std::move(first);
        queue_.pop_front();
        if (slots_[slot].piece.bounced) {
            slots_[slot].bounce = std::move(bounces_.back());
            bounces_.pop_back();
        }
        fresh_.push_back(slot);
        return true;
    }

    void start(int slot) {
        Piece& piece = slots_[slot].piece;
        if (slots_[slot].bounce) {
            piece.bounce = slots_[slot].bounce->get();
            piece.fill_bounce();
        }
        ask(slot);
    }

    void ask(int slot) {
        const Piece& piece = slots_[slot].piece;
        ring_.prepare(piece.write(), piece.fd(), piece.at(), piece.left(),
                      piece.offset + piece.done, static_cast<uint64_t>(slot));
    }

    void completed(int slot, int64_t answer) {
        Piece& piece = slots_[slot].piece;
        int error = 0;
        std::string why;
        if (!piece.advance(answer, &error, &why)) return ask(slot);
        if (piece.bounce && !error) piece.empty_bounce();
        finish(slot, error, why);
    }

    void finish(int slot, int error, const std::string& why) {
        slots_[slot].piece.request->piece_done(error, why);
        slots_[slot].piece.request.reset();
        if (slots_[slot].bounce) bounces_.push_back(std::move(slots_[slot].bounce));
        free_.push_back(slot);
    }

    // The ring itself is broken: nobody may wait for ever.
    void fail_all(int error) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (size_t slot = 0; slot < slots_.size(); ++slot)
            if (slots_[slot].piece.request)
                finish(static_cast<int>(slot), error, ", io_uring_enter failed");
        for (Piece& piece : queue_) piece.request->piece_done(error, ", io_uring_enter failed");
        queue_.clear();
        usleep(10'000);  // whoever goes on submitting to it
    }

    struct Slot {
        Piece piece{};
        std::unique_ptr<BounceBuffer> bounce;
    };

    IoUring ring_;
    std::vector<Slot> slots_;
    std::vector<int> free_, fresh_;
    std::vector<std::unique_ptr<BounceBuffer>> bounces_;
    size_t num_bounces_ = 0;
    int wake_fd_ = -1;
    uint64_t woken_ = 0;
    std::thread thread_;
};

}  // namespace pyops
#endif
