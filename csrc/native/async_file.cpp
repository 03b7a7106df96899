// AsyncFile: reads and writes of one file that go on while the caller computes.
//
//     ticket = file.write(pointer, bytes, offset)  cut into pieces (file_transfer.h), handed to
//                                                  the engine, back at once
//     ...                                          io_uring where the kernel has it, else threads
//     file.wait(ticket)                            OSError with errno, what was done, and the
//                                                  file's name
//
// A temporary file loses its name as soon as it is open: whatever ends the process, nothing is left
// behind.
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/stat.h>

#include <unordered_map>

#include "io_ring.h"
#include "io_threads.h"

namespace py = pybind11;

namespace pyops {
namespace {

struct FileError {
    int number;
    std::string text;
};

class AsyncFile {
public:
    AsyncFile(const std::string& path, int64_t bytes, const std::string& engine, bool direct,
              bool temporary, int depth, int threads, int64_t piece_bytes)
        : path(path), pid_(getpid()), piece_bytes_(piece_bytes) {
        if (bytes < 0 || depth < 1 || depth > 4096 || threads < 1 || threads > 256 ||
            piece_bytes < 4096 || piece_bytes % 4096)
            throw std::invalid_argument(
                "AsyncFile: bytes must be 0 or more, depth 1 to 4096, threads 1 to 256, "
                "piece_bytes a multiple of 4096");
        buffered_ =
            open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | (temporary ? O_EXCL : 0), 0600);
        if (buffered_ < 0) throw FileError{errno, std::strerror(errno)};
        try {
            if (direct) open_direct();
            if (temporary) ::unlink(path.c_str());
            reserve(bytes);
            start(engine, depth, threads);
        } catch (...) {
            close_files();
            throw;
        }
    }
    AsyncFile(const AsyncFile&) = delete;
    AsyncFile& operator=(const AsyncFile&) = delete;

    ~AsyncFile() {
        if (getpid() != pid_) engine_.release();  // a fork: the engine's threads are the parent's
        close();
    }

    // `owner` is kept until wait() or close(): the memory must be there even if nobody waits.
    int64_t submit(bool write, uintptr_t memory, int64_t bytes, int64_t offset, py::object owner) {
        if (!engine_ || getpid() != pid_)
            throw FileError{EBADF, engine_ ? "opened by another process, before a fork"
                                           : "this file is closed"};
        if (bytes < 0 || offset < 0)
            throw std::invalid_argument("AsyncFile: bytes and offset must be 0 or more");
        auto request = std::make_shared<Request>(write, bytes, offset);
        std::vector<Piece> pieces = cut(request, reinterpret_cast<char*>(memory), bytes, offset);
        request->expect(static_cast<int64_t>(pieces.size()));
        const int64_t ticket = next_++;
        requests_[ticket] = {request, std::move(owner)};
        if (!pieces.empty()) engine_->submit(std::move(pieces));
        return ticket;
    }

    void wait(int64_t ticket) {
        const auto request = find(ticket);
        int error = 0;
        {
            py::gil_scoped_release release;
            error = request->wait();
        }
        requests_.erase(ticket);
        if (error) throw FileError{error, request->description()};
    }

    bool done(int64_t ticket) { return find(ticket)->done(); }

    // Everything submitted comes to its end first; errors are those of wait().
    void close() {
        {
            std::unique_ptr<Engine> last = std::move(engine_);
            py::gil_scoped_release release;
            last.reset();
        }
        requests_.clear();
        close_files();
    }

    const char* engine() const { return engine_ ? engine_->name() : "closed"; }
    bool direct() const { return direct_ >= 0; }
    int64_t alignment() const { return std::max(block_, memory_alignment_); }

    const std::string path;

private:
    std::shared_ptr<Request> find(int64_t ticket) {
        const auto found = requests_.find(ticket);
        if (found == requests_.end())
            throw std::invalid_argument("AsyncFile: ticket " + std::to_string(ticket) +
                                        " is unknown, or was waited for");
        return found->second.request;
    }

    // A file system without O_DIRECT (tmpfs before Linux 6.6, some network ones) says EINVAL here;
    // the page cache then does.
    void open_direct() {
        direct_ = open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC);
        if (direct_ < 0 && errno != EINVAL) throw FileError{errno, std::strerror(errno)};
#ifdef STATX_DIOALIGN
        struct statx found{};
        if (direct_ >= 0 && statx(direct_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 &&
            (found.stx_mask & STATX_DIOALIGN)) {
            if (found.stx_dio_offset_align == 0) {
                ::close(direct_);
                direct_ = -1;
            } else {
                block_ = std::max<int64_t>(block_, found.stx_dio_offset_align);
                memory_alignment_ = std::max<int64_t>(4, found.stx_dio_mem_align);
            }
        }
#endif
        if (block_ > BOUNCE_BYTES || memory_alignment_ > 4096) {  // more than a bounce buffer has
            ::close(direct_);
            direct_ = -1;
        }
    }

    // Space now, so that a full disk is known before anything depends on it, and writes need not
    // extend the file.
    void reserve(int64_t bytes) {
        if (bytes == 0) return;
        const std::string what = " (making room for " + std::to_string(bytes) + " bytes)";
        if (fallocate(buffered_, 0, 0, bytes) < 0) {
            if (errno != EOPNOTSUPP) throw FileError{errno, std::strerror(errno) + what};
            if (ftruncate(buffered_, bytes) < 0)
                throw FileError{errno, std::strerror(errno) + what};
        }
    }

    void start(const std::string& engine, int depth, int threads) {
        if (engine != "auto" && engine != "io_uring" && engine != "threads")
            throw std::invalid_argument("AsyncFile: engine is '" + engine +
                                        "'; choose auto, io_uring or threads");
        if (engine != "threads") {
            int refused = ENOSYS;
#ifdef PYOPS_IO_URING
            try {
                engine_ = std::make_unique<IoUringEngine>(depth);
                return;
            } catch (const std::system_error& error) {
                refused = error.code().value();
            }
#endif
            if (engine == "io_uring")
                throw FileError{refused, std::string("io_uring: ") + std::strerror(refused)};
        }
        engine_ = std::make_unique<ThreadEngine>(threads);
    }

    std::vector<Piece> cut(const std::shared_ptr<Request>& request, char* memory, int64_t bytes,
                           int64_t offset) const {
        std::vector<Piece> pieces;
        const auto add = [&](int64_t start, int64_t stop, int fd, bool bounced, int64_t most) {
            for (int64_t at = start; at < stop; at += most)
                pieces.push_back({request, fd, buffered_, memory + (at - offset), at,
                                  std::min(most, stop - at), bounced});
        };
        const int64_t end = offset + bytes, start = (offset + block_ - 1) / block_ * block_,
                      stop = end / block_ * block_;
        if (direct_ < 0 || start >= stop) {
            add(offset, end, -1, false, piece_bytes_);
            return pieces;
        }
        const bool bounced = reinterpret_cast<uintptr_t>(memory + (start - offset)) %
                             static_cast<uintptr_t>(memory_alignment_);
        add(offset, start, -1, false, block_);
        add(start, stop, direct_, bounced,
            bounced ? std::min(BOUNCE_BYTES, piece_bytes_) : piece_bytes_);
        add(stop, end, -1, false, block_);
        return pieces;
    }

    void close_files() {
        if (direct_ >= 0) ::close(direct_);
        if (buffered_ >= 0) ::close(buffered_);
        direct_ = buffered_ = -1;
    }

    const pid_t pid_;
    const int64_t piece_bytes_;
    int buffered_ = -1, direct_ = -1;
    // At least a page: of a page that goes by O_DIRECT in one part and through the page cache in
    // another, at once, the old bytes of the first part may come back, whatever the disk's own
    // blocks are.
    int64_t block_ = std::max<int64_t>(4096, sysconf(_SC_PAGESIZE)), memory_alignment_ = 4096;
    struct Entry {
        std::shared_ptr<Request> request;
        py::object owner;
    };
    int64_t next_ = 0;
    std::unordered_map<int64_t, Entry> requests_;  // under Python's lock
    std::unique_ptr<Engine> engine_;
};

// FileError -> OSError(errno, text, path), which Python turns into its subclass.
template <class Call>
auto raising(const std::string& path, Call call) {
    try {
        return call();
    } catch (const FileError& error) {
        PyErr_SetObject(PyExc_OSError, py::make_tuple(error.number, error.text, path).ptr());
        throw py::error_already_set();
    }
}

template <bool WRITE>
int64_t transfer(AsyncFile& file, uintptr_t memory, int64_t bytes, int64_t offset,
                 py::object owner) {
    return raising(file.path,
                   [&] { return file.submit(WRITE, memory, bytes, offset, std::move(owner)); });
}

}  // namespace
}  // namespace pyops

void bind_async_file(py::module_& m) {
    using pyops::AsyncFile;
    py::class_<AsyncFile>(
        m, "AsyncFile",
        "Asynchronous direct reads and writes of one file. Pointers are integers; `owner`, whoever "
        "owns the "
        "memory, is kept until wait() or close(). Errors are OSErrors that name the file.")
        .def(py::init([](const std::string& path, int64_t bytes, const std::string& engine,
                         bool direct, bool temporary, int depth, int threads, int64_t piece_bytes) {
                 return pyops::raising(path, [&] {
                     return std::make_unique<AsyncFile>(path, bytes, engine, direct, temporary,
                                                        depth, threads, piece_bytes);
                 });
             }),
             py::arg("path"), py::arg("bytes") = 0, py::arg("engine") = "auto",
             py::arg("direct") = true, py::arg("temporary") = true, py::arg("depth") = 32,
             py::arg("threads") = 4, py::arg("piece_bytes") = 4 << 20)
        .def("read", &pyops::transfer<false>, py::arg("memory"), py::arg("bytes"),
             py::arg("offset"), py::arg("owner") = py::none())
        .def("write", &pyops::transfer<true>, py::arg("memory"), py::arg("bytes"),
             py::arg("offset"), py::arg("owner") = py::none())
        .def("wait", [](AsyncFile& self,
                        int64_t ticket) { pyops::raising(self.path, [&] { self.wait(ticket); }); })
        .def("done", &AsyncFile::done)
        .def("close", &AsyncFile::close)
        .def_property_readonly("path", [](const AsyncFile& self) { return self.path; })
        .def_property_readonly("engine", &AsyncFile::engine)
        .def_property_readonly("direct", &AsyncFile::direct)
        .def_property_readonly("alignment", &AsyncFile::alignment);
}
