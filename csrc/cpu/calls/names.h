// Options that a schema gives by name.
#pragma once
#include <string>

#include "../../host/optimizers/table.h"
#include "../../math/layers/activation.h"

namespace pyops {

inline int activation_code(const std::string& name, const char* op) {
    const char* const names[ACTIVATIONS] = {"gelu", "gelu_tanh", "relu", "silu"};
    for (int code = 0; code < ACTIVATIONS; ++code)
        if (name == names[code]) return code;
    require(false, "pyops::", op, ": activation must be one of gelu, gelu_tanh, relu, silu; got ",
            name);
    return -1;
}

}  // namespace pyops
