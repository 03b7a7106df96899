// The calls of a flight record, in the memory of its file: pybind11 class CallLog. A call of a step
// meets cold caches, where each function of Python and each lookup in a table that it goes through
// costs microseconds. So what is the same for many calls is a Kind, whose call copies a prepared
// entry, and both the begin of a Kind and `run` are functions of CPython itself, without the
// conversions of pybind11. pyops/flight_record/call_log.py says what each does, and does it where
// this was not built.
//
//    memory    | header | entry 1 | entry 2 | ... | entry n |  call n + 1 takes the place of call 1
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

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

// How many calls that are noted, or need not be, this thread is within.
thread_local int depth = 0;

// A place that was looked for, and where: the next call of a kind mostly comes from there.
struct Place {
    PyObject* code = nullptr;
    int instruction = -1;
    std::string_view text = "?";
};

// What calls of one operation have in common: their entry, all but number, time, bytes and place.
struct Kind {
    Entry entry{};
    uint64_t* count = nullptr;  // calls of the group, or messages to the peer
    Place place;
};

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

    Kind kind(uint32_t group, const py::str& op, int32_t peer, const py::str& dtype,
              const py::str& label) {
        Kind found;
        found.entry.group = group;
        found.entry.peer = peer;
        found.entry.state = RUNNING;
        write(found.entry.op, text_of(op));
        write(found.entry.dtype, text_of(dtype));
        write(found.entry.label, text_of(label));
        // Messages to one rank and collectives of a group are counted apart.
        found.count = &counts_[{group, peer, peer < 0 ? "" : std::string(text_of(op))}];
        return found;
    }

    uint64_t begin(Kind& kind, uint64_t bytes, PyFrameObject* frame) {
        if (!later_.empty()) look();
        find_place(frame, kind.place);
        const double now = seconds_of(CLOCK_MONOTONIC);
        const uint64_t index = ++index_;
        Entry& entry = at(index);
        if (entry.state == RUNNING && entry.index + entries_ == index)
            overtaken_.emplace(entry.index, entry.begun - clock_);
        entry = kind.entry;
        entry.index = index;
        entry.sequence = ++*kind.count;
        entry.begun = now + clock_;
        entry.bytes = bytes;
        write(entry.place, kind.place.text);
        return index;
    }

    void finish(uint64_t index, bool failed) {
        const double now = seconds_of(CLOCK_MONOTONIC);
        Entry& entry = at(index);
        if (entry.index != index) {  // its place is that of a later call
            overtaken_.erase(index);
        } else if (entry.state == RUNNING) {  // and not ended before
            entry.ended = now + clock_;
            entry.state = failed ? FAILED : FINISHED;
        }
    }

    void finish_later(uint64_t index, py::object is_done) {
        later_.emplace_back(index, std::move(is_done));
    }

    std::optional<double> oldest() {
        look();
        std::optional<double> found;
        for (const auto& [index, begun] : overtaken_)
            if (!found || begun < *found) found = begun;
        if (found) return found;
        // All calls before `first_` have ended, and later ones began later.
        if (index_ >= entries_) first_ = std::max(first_, index_ - entries_ + 1);
        for (; first_ <= index_; ++first_)
            if (at(first_).state == RUNNING) return at(first_).begun - clock_;
        return std::nullopt;
    }

    // The time when this thread began to wait; less than 0 where its waits are not counted.
    double enter() {
        ++depth;
        if (PyThread_get_thread_ident() != thread_) return -1.0;
        const double begun = seconds_of(CLOCK_MONOTONIC);
        if (!on_wait.is_none()) {
            try {
                on_wait(true);
            } catch (...) {
                --depth;
                throw;
            }
        }
        return begun;
    }

    void leave(double begun) {
        --depth;
        if (begun < 0.0) return;
        waited += seconds_of(CLOCK_MONOTONIC) - begun;
        if (!on_wait.is_none()) on_wait(false);
    }

    py::object run(uint64_t index, PyObject* body) {
        const double begun = enter();
        auto found = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(body));
        if (found) {
            if (index) finish(index, false);
            leave(begun);
            return found;
        }
        py::error_already_set error;  // takes the error, so that `leave` may call Python
        if (index) finish(index, true);
        leave(begun);
        throw error;
    }

    double waited = 0.0;
    py::object on_wait = py::none();

private:
    enum class Whose { USER, ROOM, OTHER };
    // Of code that is kept alive, so that no other has its address.
    struct Known {
        py::object code;
        Whose whose;
    };

    Entry& at(uint64_t index) { return entry_[(index - 1) % entries_]; }

    // Notes the ends of calls that went on beside the program.
    void look() {
        std::deque<std::pair<uint64_t, py::object>> waiting;
        waiting.swap(later_);  // `is_done` may let another thread in here
        for (auto& [index, is_done] : waiting) {
            if (py::cast<bool>(is_done()))
                finish(index, false);
            else
                later_.emplace_back(index, std::move(is_done));
        }
    }

    Whose whose(PyObject* code) {
        // A few lines of cache in front of the table, which has everything in places of its own.
        auto& recent = recent_[(reinterpret_cast<uintptr_t>(code) >> 6) % recent_.size()];
        if (recent.first != code) recent = {code, looked_up(code)};
        return recent.second;
    }

    Whose looked_up(PyObject* code) {
        if (const auto found = codes_.find(code); found != codes_.end()) return found->second.whose;
        auto kept = py::reinterpret_borrow<py::object>(code);
        const auto said = py::cast<std::string>(whose_(kept.attr("co_filename")));
        const Whose whose = said == "user"   ? Whose::USER
                            : said == "room" ? Whose::ROOM
                                             : Whose::OTHER;
        codes_.emplace(code, Known{std::move(kept), whose});
        return whose;
    }

    // The line of the user's program, as user_frame of pyops/flight_record/frames.py finds it.
    void find_place(PyFrameObject* frame, Place& last) {
        auto each = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame));
        py::object found;
        PyObject* code_found = nullptr;
        while (each) {
            auto* here = reinterpret_cast<PyFrameObject*>(each.ptr());
            // The frame keeps its code alive.
            auto* code = reinterpret_cast<PyObject*>(PyFrame_GetCode(here));
            Py_DECREF(code);
            const Whose whose = this->whose(code);
            if (whose == Whose::USER || (whose == Whose::ROOM && !found)) {
                found = each;
                code_found = code;
            }
            if (whose == Whose::USER) break;
            each = py::reinterpret_steal<py::object>(
                reinterpret_cast<PyObject*>(PyFrame_GetBack(here)));
        }
        if (!found) {
            last = Place{};
            return;
        }
        const int at = instruction(reinterpret_cast<PyFrameObject*>(found.ptr()));
        if (last.code == code_found && last.instruction == at) return;
        const std::pair<PyObject*, int> key{code_found, at};
        auto place = places_.find(key);
        if (place == places_.end())
            place = places_.emplace(key, py::cast<std::string>(describe_(found))).first;
        last = Place{code_found, at, place->second};
    }

    py::buffer held_;
    py::buffer_info info_;
    Entry* entry_;
    uint64_t entries_, index_ = 0, first_ = 1;
    py::function whose_, describe_;
    double clock_;
    unsigned long thread_ = PyThread_get_thread_ident();
    std::unordered_map<uint64_t, double> overtaken_;  // calls that have not ended, without a place
    std::deque<std::pair<uint64_t, py::object>> later_;
    std::map<std::tuple<uint32_t, int32_t, std::string>, uint64_t> counts_;
    std::array<std::pair<PyObject*, Whose>, 256> recent_{};
    std::unordered_map<PyObject*, Known> codes_;
    std::map<std::pair<PyObject*, int>, std::string> places_;
};

// --- functions of CPython, each bound to a capsule

// What a function works on: the log, which `owner` keeps alive, and the kind of its calls.
struct Bound {
    py::object owner;
    CallLog* log;
    Kind kind;
};

Bound& bound_to(PyObject* capsule) {
    return *static_cast<Bound*>(PyCapsule_GetPointer(capsule, nullptr));
}

template <typename F>
PyObject* guarded(const F& body) {
    try {
        return body();
    } catch (py::error_already_set& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

bool number_of(PyObject* given, uint64_t& number) {
    number = PyLong_AsUnsignedLongLong(given);
    return !(number == static_cast<uint64_t>(-1) && PyErr_Occurred());
}

PyObject* begin_of_kind(PyObject* self, PyObject* nbytes) {
    uint64_t bytes;
    if (!number_of(nbytes, bytes)) return nullptr;
    if (depth > 0) return PyLong_FromLong(0);
    Bound& bound = bound_to(self);
    return guarded([&] {
        return PyLong_FromUnsignedLongLong(bound.log->begin(bound.kind, bytes, PyEval_GetFrame()));
    });
}

PyObject* run_noted(PyObject* self, PyObject* const* given, Py_ssize_t count) {
    uint64_t index;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "run takes the number of a call and a function");
        return nullptr;
    }
    if (!number_of(given[0], index)) return nullptr;
    return guarded([&] { return bound_to(self).log->run(index, given[1]).release().ptr(); });
}

PyMethodDef BEGIN{"begin", begin_of_kind, METH_O, nullptr};
PyMethodDef RUN{"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_noted)),
                METH_FASTCALL, nullptr};

py::object function_of(PyMethodDef& method, const py::object& owner, Kind kind) {
    auto bound = std::make_unique<Bound>(Bound{owner, &owner.cast<CallLog&>(), kind});
    py::capsule self(bound.release(), [](void* there) { delete static_cast<Bound*>(there); });
    return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

}  // namespace
}  // namespace pyops

void bind_call_log(py::module_& m) {
    using pyops::CallLog;
    py::class_<CallLog>(m, "CallLog", "Entries of a flight record; see csrc/native/call_log.cpp.")
        .def(py::init<py::buffer, int64_t, int64_t, py::function, py::function>(),
             py::arg("memory"), py::arg("header"), py::arg("entries"), py::arg("whose"),
             py::arg("describe"))
        .def("kind",
             [](const py::object& self, uint32_t group, const py::str& op, int32_t peer,
                const py::str& dtype, const py::str& label) {
                 auto kind = self.cast<CallLog&>().kind(group, op, peer, dtype, label);
                 return pyops::function_of(pyops::BEGIN, self, kind);
             })
        .def("begin",
             [](CallLog& log, uint32_t group, const py::str& op, int32_t peer, uint64_t bytes,
                const py::str& dtype, const py::str& label, const py::object& frame) {
                 auto kind = log.kind(group, op, peer, dtype, label);
                 return log.begin(kind, bytes, reinterpret_cast<PyFrameObject*>(frame.ptr()));
             })
        .def("runner",
             [](const py::object& self) { return pyops::function_of(pyops::RUN, self, {}); })
        .def("finish", &CallLog::finish)
        .def("finish_later", &CallLog::finish_later)
        .def("oldest", &CallLog::oldest)
        .def("enter", &CallLog::enter)
        .def("leave", &CallLog::leave)
        .def_static("inside", [] { return pyops::depth > 0; })
        .def_static("shift", [](int by) { pyops::depth += by; })
        .def_readonly("waited", &CallLog::waited)
        .def_readwrite("on_wait", &CallLog::on_wait);
}
