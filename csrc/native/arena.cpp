// The Python classes of arena.h: Arena, and its blocks as buffers that give their memory back when
// the last view is gone.
#include "arena.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_arena(py::module_& m) {
    using pyops::Arena;
    py::class_<Arena::Block>(m, "ArenaBlock", py::buffer_protocol(),
                             "Memory of an arena, until it goes.")
        .def_buffer([](Arena::Block& block) {
            return py::buffer_info(block.data(), 1, py::format_descriptor<uint8_t>::format(),
                                   block.bytes());
        });
    py::class_<Arena, std::shared_ptr<Arena>>(
        m, "Arena", "Memory that is taken once and given out in blocks; see csrc/native/arena.h.")
        .def(py::init<int64_t>(), py::arg("bytes"))
        .def("allocate", &Arena::allocate, py::arg("bytes"),
             "An ArenaBlock, or None where so much is not free.")
        .def("defragment", &Arena::defragment)
        .def_property_readonly("bytes", &Arena::bytes)
        .def_property_readonly("used", &Arena::used)
        .def_property_readonly("peak", &Arena::peak)
        .def_property_readonly("room", &Arena::room)
        .def_property_readonly("address", [](const Arena& arena) {
            return reinterpret_cast<uintptr_t>(arena.base());
        });
}
