// The calls of a flight record, in the memory of its file: pybind11 class CallLog. A call of a step
// meets cold caches, where each function of Python that it goes through costs microseconds; here it
// is two calls. pyops/flight_record/call_log.py says what each does, and does it where this was not
// built.
//
//     memory    | header | entry 1 | entry 2 | ... | entry n |      call n + 1 takes the place of call 1
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace pyops {
namespace {

#pragma pack(push, 1)
struct Entry {  // ENTRY of pyops/flight_record/call_log.py
    uint64_t index, sequence;
    double begun, ended;
    uint32_t group;
    int32_t peer;
    uint64_t bytes;
    uint8_t state;
    char op[24], dtype[12], label[40], place[115];
};
#pragma pack(pop)
static_assert(sizeof(Entry) == 240);

enum State : uint8_t { RUNNING = 1, FINISHED = 2, FAILED = 3 };

double seconds_of(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <size_t n>
void write(char (&to)[n], std::string_view text) {
    const size_t length = std::min(n, text.size());
    std::memcpy(to, text.data(), length);
    std::memset(to + length, 0, n - length);
}

std::string_view text_of(const py::str& text) {
    Py_ssize_t length = 0;
    const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (!bytes) throw py::error_already_set();
    return {bytes, static_cast<size_t>(length)};
}

int instruction(PyFrameObject* frame) {
#if PY_VERSION_HEX < 0x030B0000
    return frame->f_lasti;
#else
    return PyFrame_GetLasti(frame);
#endif
}

class CallLog {
public:
    CallLog(py::buffer memory, int64_t header, int64_t entries, py::function whose,
            py::function describe)
        : held_(std::move(memory)), info_(held_.request(true)),
          entries_(static_cast<uint64_t>(entries)), whose_(std::move(whose)),
          describe_(std::move(describe)),
          clock_(seconds_of(CLOCK_REALTIME) - seconds_of(CLOCK_MONOTONIC)) {
        const int64_t needed = header + entries * static_cast<int64_t>(sizeof(Entry));
        if (entries < 1 || info_.size * info_.itemsize < needed)
            throw std::invalid_argument("the memory of a log has no room for its entries");
        entry_ = reinterpret_cast<Entry*>(static_cast<char*>(info_.ptr) + header);
    }

    uint64_t begin(uint32_t group, const py::str& op, int32_t peer, uint64_t bytes,
                   const py::str& dtype, const py::str& label, const py::object& frame) {
        const double now = seconds_of(CLOCK_MONOTONIC);
        const std::string_view place = place_of(frame), operation = text_of(op);
        // Messages to one rank and collectives of a group are counted apart.
        uint64_t& count = counts_[{group, peer, peer < 0 ? "" : std::string(operation)}];
        const uint64_t index = ++index_;
        begun_[index] = now;
        Entry& entry = at(index);
        entry.index = index;
        entry.sequence = ++count;
        entry.begun = now + clock_;
        entry.ended = 0.0;
        entry.group = group;
        entry.peer = peer;
        entry.bytes = bytes;
        entry.state = RUNNING;
        write(entry.op, operation);
        write(entry.dtype, text_of(dtype));
        write(entry.label, text_of(label));
        write(entry.place, place);
        return index;
    }

    void finish(uint64_t index, bool failed) {
        const double now = seconds_of(CLOCK_MONOTONIC);
        // Nothing of a call that ended before, or whose place is that of a later one.
        if (!begun_.erase(index) || index_ - index >= entries_) return;
        Entry& entry = at(index);
        entry.ended = now + clock_;
        entry.state = failed ? FAILED : FINISHED;
    }

    std::optional<double> oldest() const {
        std::optional<double> found;
        for (const auto& [index, begun] : begun_)
            if (!found || begun < *found) found = begun;
        return found;
    }

private:
    enum class Whose { USER, ROOM, OTHER };
    // Of code that is kept alive, so that no other has its address.
    struct Known {
        py::object code;
        Whose whose;
    };

    Entry& at(uint64_t index) { return entry_[(index - 1) % entries_]; }

    Whose whose(const py::object& code) {
        if (const auto found = codes_.find(code.ptr()); found != codes_.end())
            return found->second.whose;
        const auto said = py::cast<std::string>(whose_(code.attr("co_filename")));
        const Whose whose = said == "user"   ? Whose::USER
                            : said == "room" ? Whose::ROOM
                                             : Whose::OTHER;
        codes_.emplace(code.ptr(), Known{code, whose});
        return whose;
    }

    // The line of the user's program, as user_frame of pyops/flight_record/frames.py finds it.
    std::string_view place_of(const py::object& frame) {
        py::object each = frame, found, code_found;
        while (!each.is_none()) {
            auto* here = reinterpret_cast<PyFrameObject*>(each.ptr());
            auto code = py::reinterpret_steal<py::object>(
                reinterpret_cast<PyObject*>(PyFrame_GetCode(here)));
            const Whose whose = this->whose(code);
            if (whose == Whose::USER || (whose == Whose::ROOM && !found)) {
                found = each;
                code_found = code;
            }
            if (whose == Whose::USER) break;
            auto* back = reinterpret_cast<PyObject*>(PyFrame_GetBack(here));
            each = back ? py::reinterpret_steal<py::object>(back) : py::none();
        }
        if (!found) return "?";
        const auto* here = reinterpret_cast<PyFrameObject*>(found.ptr());
        const std::pair<PyObject*, int> key{code_found.ptr(),
                                            instruction(const_cast<PyFrameObject*>(here))};
        auto place = places_.find(key);
        if (place == places_.end())
            place = places_.emplace(key, py::cast<std::string>(describe_(found))).first;
        return place->second;
    }

    py::buffer held_;
    py::buffer_info info_;
    Entry* entry_;
    uint64_t entries_, index_ = 0;
    py::function whose_, describe_;
    double clock_;
    std::unordered_map<uint64_t, double> begun_;
    std::map<std::tuple<uint32_t, int32_t, std::string>, uint64_t> counts_;
    std::unordered_map<PyObject*, Known> codes_;
    std::map<std::pair<PyObject*, int>, std::string> places_;
};

}  // namespace
}  // namespace pyops

void bind_call_log(py::module_& m) {
    using pyops::CallLog;
    py::class_<CallLog>(m, "CallLog", "Entries of a flight record; see csrc/native/call_log.cpp.")
        .def(py::init<py::buffer, int64_t, int64_t, py::function, py::function>(),
             py::arg("memory"), py::arg("header"), py::arg("entries"), py::arg("whose"),
             py::arg("describe"))
        .def("begin", &CallLog::begin)
        .def("finish", &CallLog::finish)
        .def("oldest", &CallLog::oldest);
}
