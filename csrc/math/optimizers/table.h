// The optimizer's table: one row of int64 per parameter. pyops/ops/optimizers/table.py holds the
// same numbers and the picture.
#pragma once
#include <cstdint>

namespace pyops {

enum Column : int {
    PARAM,
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    MAX,
    MASTER,
    COPY,
    STEP,  // pointers, 0 where absent
    NUMEL,
    PACKED,       // dtypes: 4 bits each for param, grad, moments, master, copy
    OFFSET,       // global index of the row's first element, for stochastic rounding
    FIRST_CHUNK,  // chunks of CHUNK elements in the rows above
    COLUMNS
};
// A set of columns, one bit for each.
template <typename... Columns>
constexpr unsigned set_of(Columns... columns) {
    return (0u | ... | (1u << columns));
}
constexpr unsigned OF_ANY_RULE = set_of(PARAM, GRAD, STEP);  // what a table always holds

constexpr int64_t CHUNK = 4096;  // 1 Mi elements already keep a GPU of 132 multiprocessors busy

enum Dtype : int { FP32 = 0, BF16 = 1, FP16 = 2, FP64 = 3 };
enum Field : int {
    PARAM_DTYPE = 0,
    GRAD_DTYPE = 1,
    MOMENT_DTYPE = 2,
    MASTER_DTYPE = 3,
    COPY_DTYPE = 4
};

constexpr int dtype_of(int64_t packed, Field field) {
    return static_cast<int>((packed >> (4 * field)) & 15);
}

}  // namespace pyops
