#include <pybind11/pybind11.h>

void bind_parameter_scan(pybind11::module_& m) { (void)m; }
