// Lion's ops, for both devices. The order of the arguments is that of the schema in
// pyops/ops/optimizers/lion.py.
#pragma once
#include "../../math/optimizers/lion.h"
#include "one_state_ops.h"

namespace pyops {

inline constexpr char LION[] = "lion_", LION_FROM_TABLE[] = "lion_from_table_";

template <typename Backend>
using LionOps = OneStateOps<Backend, Lion, EXP_AVG, LION, LION_FROM_TABLE>;

}  // namespace pyops
