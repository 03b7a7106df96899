// Messages from one process of a host to another, in order, over shared memory: pybind11 class
// Mailbox.
//
//     ring      | ...... | length, message | length, message | ...... |   bytes wrap around its end
//                        ^ taken so far                      ^ put so far
//
// For messages that are short beside the time that two processes need to tell each other anything:
// putting one is a copy, and a reader that waits spins for a moment before it sleeps. A message
// that finds no room is refused: the writer never waits.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>

#include "shared_region.h"

namespace py = pybind11;

namespace pyops {
namespace {

// Bytes before a message that hold its length; messages begin at multiples of it
constexpr uint64_t LENGTH = 8;

class Mailbox {
public:
    Mailbox(const std::string& name, bool writes, int64_t bytes)
        : bytes_(static_cast<uint64_t>(bytes)) {
        if (bytes < 4096 || bytes % 4096)
            throw std::invalid_argument("a mailbox has a multiple of 4096 bytes");
        region_ =
            std::make_unique<Region>(name, writes ? 0 : 1, 2, writes, static_cast<size_t>(bytes));
    }

    void unlink() { region_->unlink(); }

    // False where there is no room for it now.
    bool put(uintptr_t data, int64_t n) {
        const uint64_t size = LENGTH + rounded(n),
                       put = region_->mine().in.load(std::memory_order_relaxed);
        // Acquire: the reader has copied out what it counts as taken, so its place may be reused.
        const uint64_t taken = region_->control(1).out.load(std::memory_order_acquire);
        if (size > bytes_ - (put - taken)) return false;
        const uint64_t length = static_cast<uint64_t>(n);
        copy_in(put, &length, LENGTH);
        copy_in(put + LENGTH, reinterpret_cast<const void*>(data), length);
        // Last: post() releases the count, and with it the bytes that were copied in.
        region_->post(&Control::in, put + size);
        return true;
    }

    // Whether a message is there.
    bool ready() { return region_->control(0).in.load(std::memory_order_acquire) > taken(); }

    // The length of the next message, when it is there; -2 for a writer that died, -3 for one that
    // is later than `timeout`.
    int64_t wait(int spins, double timeout) {
        if (!ready()) {
            py::gil_scoped_release released;
            region_->spins = spins;
            region_->timeout = timeout;
            const Status status = region_->wait(&Control::in, taken() + 1);
            if (!status.ok()) return -status.code;
        }
        uint64_t length;
        copy_out(taken(), &length, LENGTH);
        return static_cast<int64_t>(length);
    }

    // The message that `wait` told of; its room is free again.
    void take(uintptr_t data) {
        uint64_t length;
        copy_out(taken(), &length, LENGTH);
        copy_out(taken() + LENGTH, reinterpret_cast<void*>(data), length);
        region_->post(&Control::out, taken() + LENGTH + rounded(static_cast<int64_t>(length)));
    }

private:
    static uint64_t rounded(int64_t n) {
        return (static_cast<uint64_t>(n) + LENGTH - 1) / LENGTH * LENGTH;
    }
    uint64_t taken() { return region_->mine().out.load(std::memory_order_relaxed); }

    void copy_in(uint64_t at, const void* from, uint64_t n) {
        const uint64_t place = at % bytes_, first = std::min(n, bytes_ - place);
        std::memcpy(region_->memory() + place, from, first);
        std::memcpy(region_->memory(), static_cast<const char*>(from) + first, n - first);
    }
    void copy_out(uint64_t at, void* to, uint64_t n) {
        const uint64_t place = at % bytes_, first = std::min(n, bytes_ - place);
        std::memcpy(to, region_->memory() + place, first);
        std::memcpy(static_cast<char*>(to) + first, region_->memory(), n - first);
    }

    const uint64_t bytes_;
    std::unique_ptr<Region> region_;
};

}  // namespace
}  // namespace pyops

void bind_mailbox(py::module_& m) {
    using pyops::Mailbox;
    py::class_<Mailbox>(
        m, "Mailbox",
        "One end of a line of messages between two processes of a host. Pointers are integers.")
        .def(py::init<const std::string&, bool, int64_t>(), py::arg("name"), py::arg("writes"),
             py::arg("bytes") = 1 << 19)
        .def("unlink", &Mailbox::unlink)
        .def("put", &Mailbox::put, py::arg("memory"), py::arg("bytes"))
        .def("ready", &Mailbox::ready)
        .def("wait", &Mailbox::wait, py::arg("spins"), py::arg("timeout"))
        .def("take", &Mailbox::take, py::arg("memory"));
}
