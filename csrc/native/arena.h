// Arena: memory taken once, given out by moving a mark up, taken back from the top down; holes are
// closed without a copy.
//
//     file of pages  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |  anonymous, all in memory from the start
//     region 0       | a | a | . | b | . | c | c | . |  a, b, c are in use, 3 pages are not
//     defragment:    region 1  | 2 | 4 | 7 |            the same free pages once more, side by side
//
// A block of three pages now fits, though nothing was moved: a, b and c stay at their addresses, so
// every pointer and every view of them holds, whoever made it. What is freed in the order opposite
// to allocation costs nothing and leaves no hole.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pyops {

constexpr int64_t PAGE = 4096;

class Arena : public std::enable_shared_from_this<Arena> {
public:
    struct Region {
        char* base = nullptr;
        std::vector<int64_t> frames;  // page of the file behind each page
        struct Span {
            int64_t start, stop;
            bool live;
        };
        std::vector<Span> spans;  // in order; the last one is live
        int64_t top() const { return spans.empty() ? 0 : spans.back().stop; }
        int64_t room() const { return static_cast<int64_t>(frames.size()) - top(); }
    };

    // Memory of the arena, until it goes.
    class Block {
    public:
        Block(std::shared_ptr<Arena> arena, std::shared_ptr<Region> region, int64_t page,
              int64_t bytes)
            : arena_(std::move(arena)), region_(std::move(region)), page_(page), bytes_(bytes) {}
        Block(const Block&) = delete;
        Block& operator=(const Block&) = delete;
        ~Block() { arena_->free(region_, page_); }
        char* data() const { return region_->base + page_ * PAGE; }
        int64_t bytes() const { return bytes_; }

    private:
        std::shared_ptr<Arena> arena_;
        std::shared_ptr<Region> region_;
        int64_t page_, bytes_;
    };

    explicit Arena(int64_t bytes) : pages_((bytes + PAGE - 1) / PAGE) {
        if (bytes < 1)
            throw std::invalid_argument("an arena needs 1 byte or more, got " +
                                        std::to_string(bytes));
        // The kernel would take page after page until processes die: ask first.
        if (const int64_t there = available(); bytes > there)
            throw std::runtime_error("an arena of " + std::to_string(bytes) +
                                     " bytes: the system has " + std::to_string(there) +
                                     " available; ask for less");
        file_ = memfd_create("pyops-arena", MFD_CLOEXEC);
        if (file_ < 0) fail("memfd_create");
        // Room that is not there would be a bus error later.
        if (ftruncate(file_, pages_ * PAGE) < 0 ||
            (errno = posix_fallocate(file_, 0, pages_ * PAGE)) != 0) {
            const int reason = errno;
            close(file_);
            errno = reason;
            fail("making room");
        }
        busy_.assign(static_cast<size_t>(pages_), false);
        whole_ = std::make_shared<Region>();
        for (int64_t page = 0; page < pages_; ++page) whole_->frames.push_back(page);
        void* found = mmap(nullptr, pages_ * PAGE, PROT_READ | PROT_WRITE,
                           MAP_SHARED | MAP_POPULATE, file_, 0);
        if (found == MAP_FAILED) {
            const int reason = errno;
            close(file_);
            errno = reason;
            fail("mmap");
        }
        whole_->base = static_cast<char*>(found);
        current_ = whole_;
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {  // blocks keep their arena, so all is free, and the only region is the whole
        unmap(*whole_);
        close(file_);
    }

    // A block of this many bytes; nullptr where so many are not free. Closes holes when it has to.
    std::unique_ptr<Block> allocate(int64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        const int64_t pages = std::max<int64_t>(1, (bytes + PAGE - 1) / PAGE);
        if (pages > pages_ - used_) return nullptr;
        if (current_->room() < pages) close_holes();
        const int64_t start = current_->top();
        current_->spans.push_back({start, start + pages, true});
        mark(*current_, start, start + pages, true);
        used_ += pages;
        peak_ = std::max(peak_, used_);
        return std::make_unique<Block>(shared_from_this(), current_, start, bytes);
    }

    // Make all free memory one piece. Blocks stay where they are.
    void defragment() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (current_->room() < pages_ - used_) close_holes();
    }

    int64_t bytes() const { return pages_ * PAGE; }
    int64_t used() const { return used_ * PAGE; }
    int64_t peak() const { return peak_ * PAGE; }
    int64_t room() const { return current_->room() * PAGE; }  // in one piece
    char* base() const { return whole_->base; }

private:
    [[noreturn]] void fail(const std::string& what) const {
        throw std::runtime_error("an arena of " + std::to_string(bytes()) + " bytes: " + what +
                                 ": " + std::strerror(errno));
    }

    // Bytes that the system can give without swapping.
    static int64_t available() {
        long long kilobytes = 0;
        char line[256];
        if (FILE* file = std::fopen("/proc/meminfo", "r")) {
            while (std::fgets(line, sizeof line, file))
                if (std::sscanf(line, "MemAvailable: %lld kB", &kilobytes) == 1) break;
            std::fclose(file);
        }
        return kilobytes ? kilobytes * 1024
                         : int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    }

    static void unmap(Region& region) {
        if (region.base) munmap(region.base, region.frames.size() * PAGE);
        region.base = nullptr;
    }

    void mark(const Region& region, int64_t start, int64_t stop, bool busy) {
        for (int64_t page = start; page < stop; ++page)
            busy_[static_cast<size_t>(region.frames[static_cast<size_t>(page)])] = busy;
    }

    void free(const std::shared_ptr<Region>& region, int64_t start) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto& spans = region->spans;
        const auto found = std::lower_bound(
            spans.begin(), spans.end(), start,
            [](const Region::Span& span, int64_t page) { return span.start < page; });
        found->live = false;
        mark(*region, found->start, found->stop, false);
        used_ -= found->stop - found->start;
        while (!spans.empty() && !spans.back().live) spans.pop_back();
        if (!spans.empty()) return;
        if (used_ == 0 && current_ != whole_) {  // all is free: back to the pages in their order
            if (region != current_) unmap_unless_whole(*region);
            unmap(*current_);
            current_ = whole_;
        } else if (region != current_) {
            unmap_unless_whole(*region);
        }
    }

    void unmap_unless_whole(Region& region) {
        if (&region != whole_.get()) unmap(region);
    }

    // A new region of all free pages.
    void close_holes() {
        auto fresh = std::make_shared<Region>();
        for (int64_t page = 0; page < pages_; ++page)
            if (!busy_[static_cast<size_t>(page)]) fresh->frames.push_back(page);
        const auto& frames = fresh->frames;
        void* found = mmap(nullptr, frames.size() * PAGE, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (found == MAP_FAILED) fail("mmap");
        fresh->base = static_cast<char*>(found);
        for (size_t i = 0; i < frames.size();) {
            size_t j = i + 1;
            while (j < frames.size() && frames[j] == frames[j - 1] + 1) ++j;
            void* piece = mmap(fresh->base + i * PAGE, (j - i) * PAGE, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_FIXED | MAP_POPULATE, file_, frames[i] * PAGE);
            if (piece == MAP_FAILED) {  // more pieces than the kernel maps for a process
                const int reason = errno;
                unmap(*fresh);
                errno = reason;
                fail("mapping its free pages side by side");
            }
            i = j;
        }
        if (current_ != whole_ && current_->spans.empty()) unmap(*current_);
        current_ = fresh;
    }

    const int64_t pages_;
    int file_ = -1;
    int64_t used_ = 0, peak_ = 0;
    std::vector<bool> busy_;
    std::shared_ptr<Region> whole_, current_;
    std::mutex mutex_;
};

}  // namespace pyops
