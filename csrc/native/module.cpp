// The Python module `pyops._native`: objects that own memory, files or threads. No torch headers;
// pointers are integers.
#include <pybind11/pybind11.h>

void bind_shared_memory(pybind11::module_& m);
void bind_arena(pybind11::module_& m);
void bind_async_file(pybind11::module_& m);
void bind_parameter_scan(pybind11::module_& m);
void bind_mailbox(pybind11::module_& m);
void bind_block_lists(pybind11::module_& m);
void bind_call_log(pybind11::module_& m);

PYBIND11_MODULE(_native, m) {
    m.doc() =
        "Objects with a life of their own, under pyops.comm, pyops.ops, pyops.optim, "
        "pyops.offload, pyops.pipeline, pyops.recompute and pyops.flight_record.";
    bind_shared_memory(m);
    bind_parameter_scan(m);
    bind_async_file(m);
    bind_arena(m);
    bind_mailbox(m);
    bind_block_lists(m);
    bind_call_log(m);
}
