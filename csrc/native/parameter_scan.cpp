// ParameterScan: has anything changed since the optimizer made its table of pointers?
//
//   every step, per parameter:  same object? same memory? gradient present as before?
//                               at the same address?
//   (a parameter may also be outside of the table: without gradient, with one that is handled
//   elsewhere, or ignored)
//
//   SAME     nothing changed: the table is good as it is
//   MOVED    gradients lie elsewhere but fit: their addresses were written to the table's column
//   REBUILD  anything else
//
// It asks the tensors through Python (no torch headers), about 0.1 us each. It holds no reference
// to a gradient, which would keep its memory alive through the next forward pass; weak references
// tell whether a gradient is the same object, and only new ones are asked for dtype, size, strides
// and memory: a few one by one, many in one call (pyops::gradients_fit), whose price of about ten
// tensors is paid once.
//
// StateWatch: is every entry of the optimizer's state the same object as before? It keeps the
// entries alive, so that an address is never that of a freed tensor.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

// Gradients that are asked one by one: for more, one call for all costs less
constexpr std::int64_t FEW = 8;

enum Verdict { SAME = 0, MOVED = 1, REBUILD = 2 };
enum Kind { ABSENT = 0, ROW = 1, ELSEWHERE = 2, IGNORED = 3 };

// Attributes and methods of torch.Tensor. For exactly torch.Tensor and nn.Parameter their C
// functions are called directly; a subclass might override them and is asked in the ordinary way.
// Why: a step asks every parameter, and a lookup by name costs as much as the answer. The pointers
// lie in descriptors of static types, which are never freed, and _PyType_Lookup borrows.
struct TensorProtocol {
    PyTypeObject* tensor = nullptr;
    PyTypeObject* parameter = nullptr;

    struct Getter {
        PyObject* name;
        PyGetSetDef* direct;
    };
    struct Method {
        PyObject* name;
        PyMethodDef* direct;
    };
    Getter grad, dtype, nbytes, is_cpu;
    Method data_ptr, is_contiguous, stride, dim, is_neg, storage_offset, untyped_storage;
    PyObject* storage_nbytes = PyUnicode_InternFromString("nbytes");
    py::object no_arguments = py::tuple();

    TensorProtocol(py::type tensor_type, py::type parameter_type)
        : tensor(reinterpret_cast<PyTypeObject*>(tensor_type.ptr())),
          parameter(reinterpret_cast<PyTypeObject*>(parameter_type.ptr())), grad(getter("grad")),
          dtype(getter("dtype")), nbytes(getter("nbytes")), is_cpu(getter("is_cpu")),
          data_ptr(method("data_ptr")), is_contiguous(method("is_contiguous")),
          stride(method("stride")), dim(method("dim")), is_neg(method("is_neg")),
          storage_offset(method("storage_offset")), untyped_storage(method("untyped_storage")) {}

    // Both types must find the very same descriptor, or the direct call would go past an override.
    PyObject* descriptor(PyObject* name) const {
        PyObject* found = _PyType_Lookup(tensor, name);
        return found == _PyType_Lookup(parameter, name) ? found : nullptr;
    }
    Getter getter(const char* text) const {
        PyObject* name = PyUnicode_InternFromString(text);
        PyObject* found = descriptor(name);
        const bool direct = found && Py_TYPE(found) == &PyGetSetDescr_Type;
        return {name, direct ? reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset : nullptr};
    }
    Method method(const char* text) const {
        PyObject* name = PyUnicode_InternFromString(text);
        PyObject* found = descriptor(name);
        const bool direct = found && Py_TYPE(found) == &PyMethodDescr_Type;
        return {name, direct ? reinterpret_cast<PyMethodDescrObject*>(found)->d_method : nullptr};
    }
    bool exact(PyObject* object) const {
        return Py_TYPE(object) == tensor || Py_TYPE(object) == parameter;
    }

    py::object get(const Getter& what, PyObject* object) const {
        PyObject* found = what.direct && exact(object)
                              ? what.direct->get(object, what.direct->closure)
                              : PyObject_GetAttr(object, what.name);
        if (!found) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(found);
    }
    py::object call(const Method& what, PyObject* object) const {
        PyObject* found = nullptr;
        if (what.direct && exact(object) && what.direct->ml_flags == METH_NOARGS) {
            found = what.direct->ml_meth(object, nullptr);
        } else if (what.direct && exact(object) &&
                   what.direct->ml_flags == (METH_VARARGS | METH_KEYWORDS)) {
            auto with_keywords = reinterpret_cast<PyCFunctionWithKeywords>(
                reinterpret_cast<void (*)()>(what.direct->ml_meth));
            found = with_keywords(object, no_arguments.ptr(), nullptr);
        } else {
            found = PyObject_CallMethodNoArgs(object, what.name);
        }
        if (!found) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(found);
    }
    std::int64_t integer(const py::object& number) const {
        const long long value = PyLong_AsLongLong(number.ptr());
        if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
        return value;
    }
    std::int64_t address(PyObject* object) const { return integer(call(data_ptr, object)); }
    std::int64_t bytes_of_storage(PyObject* object) const {
        const py::object storage = call(untyped_storage, object);
        PyObject* found = PyObject_CallMethodNoArgs(storage.ptr(), storage_nbytes);
        if (!found) throw py::error_already_set();
        return integer(py::reinterpret_steal<py::object>(found));
    }
};

// Whether `reference` (a weakref or empty) still leads to `object`.
bool leads_to(const py::object& reference, PyObject* object) {
    if (!reference) return false;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* found = nullptr;
    if (PyWeakref_GetRef(reference.ptr(), &found) != 1) return false;
    Py_DECREF(found);
    return found == object;
#else
    return PyWeakref_GetObject(reference.ptr()) == object;
#endif
}

class ParameterScan {
public:
    ParameterScan(py::list parameters, py::list kinds, py::type tensor, py::type parameter,
                  py::object gradients_fit)
        : protocol_(tensor, parameter), list_(parameters), gradients_fit_(gradients_fit) {
        if (parameters.size() != kinds.size())
            throw py::value_error("ParameterScan: kinds must have one entry per parameter");
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            const int kind = kinds[i].cast<int>();
            seen_.push_back(remember(py::reinterpret_borrow<py::object>(parameters[i]), kind));
            rows_ += kind == ROW;
        }
    }

    // Where addresses of gradients go: row r at `base[r * columns + column]`, int64, memory that
    // the caller keeps.
    void attach(std::uintptr_t base, std::int64_t columns, std::int64_t column) {
        column_ = reinterpret_cast<std::int64_t*>(base) + column;
        columns_ = columns;
        std::int64_t row = 0;
        for (const Seen& seen : seen_)
            if (seen.kind == ROW) column_[row++ * columns_] = seen.gradient;
    }

    std::int64_t rows() const { return rows_; }

    int check() {
        try {
            return scan();
        } catch (py::error_already_set&) {
            // A gradient that can't even be asked: the caller looks closely and explains
            return REBUILD;
        }
    }

private:
    struct Seen {
        py::object parameter;
        std::int64_t address = 0, bytes = 0;
        int kind = ABSENT;
        bool flat = false;
        std::int64_t gradient = 0, gradient_bytes = 0;
        py::object weak, strides, layout, kind_of_gradient, dtype, on_cpu;
    };

    Seen remember(py::object parameter, int kind) const {
        Seen seen;
        seen.parameter = parameter;
        seen.kind = kind;
        if (kind != ROW) return seen;
        py::object gradient = protocol_.get(protocol_.grad, parameter.ptr());
        seen.address = protocol_.address(parameter.ptr());
        seen.bytes = protocol_.integer(protocol_.get(protocol_.nbytes, parameter.ptr()));
        // A transposition leaves address and size as they are; with one dimension there is none.
        seen.flat = protocol_.integer(protocol_.call(protocol_.dim, parameter.ptr())) < 2;
        if (protocol_.call(protocol_.is_contiguous, parameter.ptr()).ptr() != Py_True)
            seen.layout = protocol_.call(protocol_.stride, parameter.ptr());
        seen.gradient = protocol_.address(gradient.ptr());
        if (protocol_.call(protocol_.is_contiguous, gradient.ptr()).ptr() != Py_True)
            seen.strides = protocol_.call(protocol_.stride, gradient.ptr());
        seen.kind_of_gradient = kind_of(gradient.ptr());
        seen.gradient_bytes = protocol_.integer(protocol_.get(protocol_.nbytes, gradient.ptr()));
        seen.dtype = protocol_.get(protocol_.dtype, gradient.ptr());
        seen.on_cpu = protocol_.get(protocol_.is_cpu, gradient.ptr());
        seen.weak = weak(gradient.ptr());
        return seen;
    }

    static py::object weak(PyObject* gradient) {
        PyObject* made = PyWeakref_NewRef(gradient, nullptr);
        if (!made) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(made);
    }

    // A gradient's elements, place and dtype in one number, as the op gradients_fit reads it
    // (pyops/ops/optimizers/table.py).
    py::object kind_of(PyObject* gradient) const {
        const auto dtype = py::str(protocol_.get(protocol_.dtype, gradient)).cast<std::string>();
        const std::int64_t code = dtype == "torch.float32" ? 0 : dtype == "torch.bfloat16" ? 1 : 2;
        const std::int64_t numel =
            protocol_.integer(protocol_.get(protocol_.nbytes, gradient)) / (code == 0 ? 4 : 2);
        const std::int64_t on_cpu =
            protocol_.get(protocol_.is_cpu, gradient).ptr() == Py_True ? 8 : 0;
        return py::int_(numel << 4 | on_cpu | code);
    }

    // Whether gradients that have not been seen before can stand in for the last ones: the op asks
    // the contiguous ones all that matters, their memory and a sign that is still to be taken
    // included.
    bool fit(const py::list& strangers, const py::list& kinds) const {
        return PyList_GET_SIZE(strangers.ptr()) == 0 ||
               gradients_fit_(strangers, kinds).cast<bool>();
    }

    // What the op asks, of one contiguous gradient without a call through the dispatcher. False:
    // let the op decide.
    bool plainly_fits(const Seen& seen, PyObject* gradient) const {
        if (!protocol_.exact(gradient) || !protocol_.get(protocol_.dtype, gradient).is(seen.dtype))
            return false;
        if (protocol_.integer(protocol_.get(protocol_.nbytes, gradient)) != seen.gradient_bytes)
            return false;
        if (!protocol_.get(protocol_.is_cpu, gradient).is(seen.on_cpu)) return false;
        if (protocol_.call(protocol_.is_contiguous, gradient).ptr() != Py_True) return false;
        if (protocol_.call(protocol_.is_neg, gradient).ptr() != Py_False) return false;
        if (seen.gradient_bytes == 0) return true;
        const std::int64_t width =
            seen.gradient_bytes / (seen.kind_of_gradient.cast<std::int64_t>() >> 4);
        const std::int64_t before =
            width * protocol_.integer(protocol_.call(protocol_.storage_offset, gradient));
        return before + seen.gradient_bytes <= protocol_.bytes_of_storage(gradient);
    }

    // One that is laid out in another way is asked by itself, as it would be if it lay one element
    // after the other.
    bool fits(const Seen& seen, PyObject* gradient) const {
        if (!protocol_.call(protocol_.stride, gradient).equal(seen.strides)) return false;
        const std::int64_t numel = seen.kind_of_gradient.cast<std::int64_t>() >> 4;
        const py::object asked = py::reinterpret_borrow<py::object>(gradient);
        if (asked.attr("numel")().cast<std::int64_t>() != numel) return false;
        py::list one, kind;
        one.append(asked.attr("as_strided")(py::make_tuple(numel), py::make_tuple(1)));
        kind.append(seen.kind_of_gradient);
        return fit(one, kind);
    }

    bool parameter_holds(const Seen& seen, PyObject* parameter) const {
        if (protocol_.address(parameter) != seen.address) return false;
        if (protocol_.integer(protocol_.get(protocol_.nbytes, parameter)) != seen.bytes)
            return false;
        if (seen.flat) return true;
        if (seen.layout) return protocol_.call(protocol_.stride, parameter).equal(seen.layout);
        return protocol_.call(protocol_.is_contiguous, parameter).ptr() == Py_True;
    }

    int scan() {
        const auto count = static_cast<std::size_t>(PyList_GET_SIZE(list_.ptr()));
        if (count != seen_.size()) return REBUILD;
        int verdict = SAME;
        std::int64_t row = 0, strangers = 0;
        py::list unknown, kinds;
        const bool make_weak = patience_ == 0;
        const std::int64_t singly = last_strangers_ <= FEW ? FEW : 0;
        if (patience_ > 0) --patience_;
        for (std::size_t i = 0; i < count; ++i) {
            Seen& seen = seen_[i];
            PyObject* parameter = PyList_GET_ITEM(list_.ptr(), static_cast<Py_ssize_t>(i));
            if (parameter != seen.parameter.ptr()) return REBUILD;
            if (seen.kind == IGNORED) continue;
            py::object gradient = protocol_.get(protocol_.grad, parameter);
            if (gradient.is_none() != (seen.kind == ABSENT)) return REBUILD;
            if (seen.kind != ROW) continue;
            if (!parameter_holds(seen, parameter)) return REBUILD;
            const std::int64_t address = protocol_.address(gradient.ptr());
            // Its storage was given back: the caller explains
            if (!address && seen.gradient) return REBUILD;
            const bool known = leads_to(seen.weak, gradient.ptr()) && address == seen.gradient;
            if (!known) {
                if (seen.strides) {
                    if (!fits(seen, gradient.ptr())) return REBUILD;
                } else if (strangers >= singly || !plainly_fits(seen, gradient.ptr())) {
                    unknown.append(gradient);
                    kinds.append(seen.kind_of_gradient);
                }
                seen.weak = make_weak ? weak(gradient.ptr()) : py::object();
                ++strangers;
            }
            if (address != seen.gradient) {
                seen.gradient = address;
                if (column_) column_[row * columns_] = address;
                verdict = MOVED;
            }
            ++row;
        }
        if (!fit(unknown, kinds)) return REBUILD;
        last_strangers_ = strangers;
        // Gradients made anew each step: don't pay for weak references that will be dead by the
        // next.
        if (make_weak && 2 * strangers > rows_) patience_ = 31;
        return verdict;
    }

    TensorProtocol protocol_;
    py::list list_;
    py::object gradients_fit_;
    std::vector<Seen> seen_;
    std::int64_t rows_ = 0, patience_ = 0, last_strangers_ = 0, columns_ = 1;
    std::int64_t* column_ = nullptr;
};

class StateWatch {
public:
    explicit StateWatch(py::dict state) : state_(state) {
        walk([this](PyObject* entry) {
            entries_.push_back(py::reinterpret_borrow<py::object>(entry));
            return true;
        });
    }

    bool unchanged(py::handle state) const {
        if (state.ptr() != state_.ptr()) return false;
        std::size_t position = 0;
        const bool same = walk([this, &position](PyObject* entry) {
            return position < entries_.size() && entries_[position++].ptr() == entry;
        });
        return same && position == entries_.size();
    }

private:
    // Every key and value of the state and of each parameter's dictionary, in order, until `visit`
    // says false.
    template <class Visit>
    bool walk(Visit visit) const {
        PyObject *parameter, *entry, *name, *value;
        Py_ssize_t outer = 0;
        while (PyDict_Next(state_.ptr(), &outer, &parameter, &entry)) {
            if (!visit(parameter) || !visit(entry)) return false;
            Py_ssize_t inner = 0;
            while (PyDict_CheckExact(entry) && PyDict_Next(entry, &inner, &name, &value))
                if (!visit(name) || !visit(value)) return false;
        }
        return true;
    }

    py::dict state_;
    std::vector<py::object> entries_;
};

}  // namespace

void bind_parameter_scan(py::module_& m) {
    py::class_<ParameterScan>(m, "ParameterScan",
                              "Notices what changed in parameters and gradients since it was made.")
        .def(py::init<py::list, py::list, py::type, py::type, py::object>(), py::arg("parameters"),
             py::arg("kinds"), py::arg("tensor"), py::arg("parameter"), py::arg("gradients_fit"))
        .def("attach", &ParameterScan::attach, py::arg("base"), py::arg("columns"),
             py::arg("column"))
        .def("check", &ParameterScan::check)
        .def_property_readonly("rows", &ParameterScan::rows)
        .def_property_readonly_static("SAME",
                                      [](const py::object&) { return static_cast<int>(SAME); })
        .def_property_readonly_static("MOVED",
                                      [](const py::object&) { return static_cast<int>(MOVED); })
        .def_property_readonly_static("REBUILD",
                                      [](const py::object&) { return static_cast<int>(REBUILD); })
        .def_property_readonly_static("ABSENT",
                                      [](const py::object&) { return static_cast<int>(ABSENT); })
        .def_property_readonly_static("ROW",
                                      [](const py::object&) { return static_cast<int>(ROW); })
        .def_property_readonly_static("ELSEWHERE",
                                      [](const py::object&) { return static_cast<int>(ELSEWHERE); })
        .def_property_readonly_static("IGNORED",
                                      [](const py::object&) { return static_cast<int>(IGNORED); });
    py::class_<StateWatch>(m, "StateWatch",
                           "Notices any entry of an optimizer's state that was replaced.")
        .def(py::init<py::dict>(), py::arg("state"))
        .def("unchanged", &StateWatch::unchanged, py::arg("state"));
}
