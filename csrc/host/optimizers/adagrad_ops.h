// Adagrad's ops, for both devices. The order of the arguments is that of the schema in
// pyops/ops/optimizers/adagrad.py.
#pragma once
#include "../../math/optimizers/adagrad.h"
#include "one_state_ops.h"

namespace pyops {

inline constexpr char ADAGRAD[] = "adagrad_", ADAGRAD_FROM_TABLE[] = "adagrad_from_table_";

template <typename Backend>
using AdagradOps = OneStateOps<Backend, Adagrad, EXP_AVG_SQ, ADAGRAD, ADAGRAD_FROM_TABLE>;

}  // namespace pyops
