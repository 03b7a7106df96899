// Transfers between memory and a file, cut into pieces that an engine (io_ring.h, io_threads.h)
// carries out.
//
//     request [ head | middle, middle, middle ... | tail ]      offset and length of any size
//              buffered      O_DIRECT         buffered         head, tail: less than a block each
//
// A middle piece whose memory is not aligned goes through an aligned bounce buffer. Head and tail
// go through the page cache, where the kernel merges two writers of one block; nothing here reads a
// block to write a part of it.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace pyops {

constexpr int64_t BOUNCE_BYTES = 1 << 20;

// What a caller waits for: all pieces of one read or write.
class Request {
public:
    Request(bool write, int64_t bytes, int64_t offset)
        : write(write), bytes(bytes), offset(offset) {}

    void expect(int64_t pieces) { left_ = pieces; }

    void piece_done(int error, const std::string& why) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error && !error_) {
            error_ = error;
            why_ = why;
        }
        if (--left_ == 0) done_.notify_all();
    }

    // 0, or the errno of the first piece that failed.
    int wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return left_ == 0; });
        return error_;
    }

    bool done() {
        std::lock_guard<std::mutex> lock(mutex_);
        return left_ == 0;
    }

    std::string description() const {
        return std::string(std::strerror(error_)) + " (" + (write ? "write of " : "read of ") +
               std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + why_ + ")";
    }

    const bool write;
    const int64_t bytes, offset;

private:
    std::mutex mutex_;
    std::condition_variable done_;
    int64_t left_ = 0;
    int error_ = 0;
    std::string why_;
};

struct Piece {
    std::shared_ptr<Request> request;
    int direct_fd, buffered_fd;  // direct_fd is -1 for a piece that is no multiple of blocks
    char* memory;
    int64_t offset, bytes;
    bool bounced;
    int64_t done = 0;
    char* bounce = nullptr;

    bool write() const { return request->write; }
    char* at() const { return (bounce ? bounce : memory) + done; }
    int64_t left() const { return bytes - done; }
    int fd() const { return direct_fd >= 0 ? direct_fd : buffered_fd; }

    void fill_bounce() {
        if (write()) std::memcpy(bounce, memory, static_cast<size_t>(bytes));
    }
    void empty_bounce() {
        if (!write()) std::memcpy(memory, bounce, static_cast<size_t>(bytes));
    }

    // What the kernel answered: bytes moved, or -errno. True when the piece is over, with *error
    // set if it failed.
    bool advance(int64_t answer, int* error, std::string* why) {
        if (answer == -EINTR || answer == -EAGAIN) return false;
        // Not for O_DIRECT: what a short transfer left, which is no multiple of blocks
        if (answer == -EINVAL && direct_fd >= 0) {
            direct_fd = -1;
            return false;
        }
        if (answer < 0) {
            *error = static_cast<int>(-answer);
        } else if (answer == 0 && left() > 0) {
            *error = write() ? ENOSPC : EIO;
        } else {
            done += answer;
        }
        if (*error) {
            *why = ", " + std::to_string(done) + " of " + std::to_string(bytes) +
                   (write() ? " written" : " there") + " at " + std::to_string(offset);
        }
        return *error || done == bytes;
    }
};

// Memory as O_DIRECT needs it.
class BounceBuffer {
public:
    BounceBuffer() : memory_(static_cast<char*>(std::aligned_alloc(4096, BOUNCE_BYTES))) {
        if (!memory_) throw std::bad_alloc();
    }
    BounceBuffer(const BounceBuffer&) = delete;
    BounceBuffer& operator=(const BounceBuffer&) = delete;
    ~BounceBuffer() { std::free(memory_); }
    char* get() const { return memory_; }

private:
    char* memory_;
};

// Pieces waiting for an engine; `wake` is called after each addition.
class Engine {
public:
    virtual ~Engine() = default;
    virtual const char* name() const = 0;

    void submit(std::vector<Piece> pieces) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (Piece& piece : pieces) queue_.push_back(std::move(piece));
        }
        wake();
    }

protected:
    virtual void wake() = 0;

    std::mutex mutex_;
    std::deque<Piece> queue_;
    bool stopping_ = false;
};

}  // namespace pyops
