// From lists of tensors to the optimizer's table, with every check that keeps a kernel from walking
// foreign memory. Host code over the stable ABI; serves tensors of any device.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "../../math/optimizers/table.h"

namespace pyops {

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// Throws a RuntimeError whose text is the arguments one after the other: the value, what was
// expected, the fix.
template <typename... Parts>
void require(bool condition, const Parts&... parts) {
    if (condition) return;
    std::ostringstream text;
    (text << ... << parts);
    throw std::runtime_error(text.str());
}

// The eight lists in the order of the table's first columns.
struct TensorLists {
    const Tensors *params, *grads, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs, *masters, *copies,
        *steps;
};

// Rows of COLUMNS numbers; throws before anything is written when a row does not fit together.
// `required`: the columns that every row must have; the lists of others may be empty. `op` names
// the caller.
std::vector<int64_t> make_table(const TensorLists& lists, const std::vector<int64_t>& offsets,
                                unsigned required, const char* op);

// The dtype code of a tensor, or -1 for any other dtype. FP64 only where the caller allows it.
int dtype_code(const Tensor& tensor);
// Whether the elements fill a stretch of memory, in whatever order of dimensions.
bool is_dense(const Tensor& tensor);
// Written as "[3, 4] with strides [1, 3]".
struct Shape {
    const Tensor& tensor;
};
std::ostream& operator<<(std::ostream& text, const Shape& shape);

// A table made by optimizer_table, on the CPU or not: int64 [n, COLUMNS], contiguous. Returns n.
int64_t check_table(const Tensor& table, const char* op);
// Throws unless every row of a table in the CPU's memory that has elements has the `required`
// columns.
void check_columns(const int64_t* table, int64_t rows, unsigned required, const char* op);
// Whether each of new gradients can stand in the table for the one before it; `expected`: numel *
// 16 + 8 on the CPU + dtype code.
bool gradients_fit(const Tensors gradients, const std::vector<int64_t> expected);
// A one-element fp32 tensor (or float64 where allowed) on the same kind of device as the op; throws
// otherwise.
void check_scalar(const std::optional<Tensor>& scalar, const char* name, bool on_cuda,
                  bool float64_allowed);

}  // namespace pyops
