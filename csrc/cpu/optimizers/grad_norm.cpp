// Squared norm of a list: float64 partial sums of fixed blocks, added in the order of the list,
// whoever computed them.
#include <cmath>

#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/loop.h"
#include "../../host/optimizers/table.h"

namespace pyops {
namespace {

constexpr int64_t BLOCK = 16384;  // elements of one partial sum

struct Piece {
    const void* data;
    int64_t n;
    int dtype;
};

Tensor norm_of(const std::vector<Piece>& tensors) {
    std::vector<Piece> blocks;
    int64_t work = 0;
    for (const Piece& t : tensors) {
        work += t.n;
        const int64_t size = t.dtype == FP32 ? 4 : 2;
        for (int64_t start = 0; start < t.n; start += BLOCK)
            blocks.push_back({static_cast<const char*>(t.data) + start * size,
                              std::min(BLOCK, t.n - start), t.dtype});
    }
    std::vector<double> sums(blocks.size());
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
            const Piece& block = blocks[static_cast<size_t>(b)];
            sums[static_cast<size_t>(b)] = kernel.squared_sum(block.data, block.n, block.dtype);
        }
    };
    const int64_t count = static_cast<int64_t>(blocks.size());
    if (work <= SERIAL)
        run(0, count);
    else
        torch::stable::parallel_for(0, count, 1, run);

    double total = 0.0;
    int64_t nonfinite = 0;
    for (size_t b = 0; b < blocks.size(); ++b) {
        total += sums[b];
        // A float64 sum of squares of finite fp32 numbers can't overflow, so a finite sum has
        // nothing to count.
        if (!std::isfinite(sums[b]))
            nonfinite += kernel.count_nonfinite(blocks[b].data, blocks[b].n, blocks[b].dtype);
    }
    const std::vector<int64_t> shape = {2};
    Tensor out = torch::stable::empty(shape, torch::headeronly::ScalarType::Double);
    double* values = static_cast<double*>(out.data_ptr());
    values[0] = total;
    values[1] = static_cast<double>(nonfinite);
    return out;
}

Tensor squared_norm(const Tensors tensors) {
    std::vector<Piece> pieces;
    pieces.reserve(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
        const int dtype = dtype_code(tensors[i]);
        require(dtype >= 0 && dtype != FP64, "pyops::squared_norm: tensors[", i,
                "] must be float32, bfloat16 or float16");
        require(tensors[i].is_cpu(), "pyops::squared_norm: tensors[", i,
                "] is on another device than the first; move it there");
        require(is_dense(tensors[i]), "pyops::squared_norm: tensors[", i, "] has shape ",
                Shape{tensors[i]}, ": gaps or overlaps in memory; pass a dense copy");
        pieces.push_back(
            {tensors[i].numel() ? tensors[i].data_ptr() : nullptr, tensors[i].numel(), dtype});
    }
    return norm_of(pieces);
}

Tensor squared_norm_from_table(const Tensor table) {
    const int64_t rows = check_table(table, "squared_norm_from_table");
    const int64_t* row = static_cast<const int64_t*>(table.data_ptr());
    std::vector<Piece> pieces;
    pieces.reserve(static_cast<size_t>(rows));
    for (int64_t r = 0; r < rows; ++r, row += COLUMNS)
        pieces.push_back({reinterpret_cast<const void*>(row[GRAD]), row[GRAD] ? row[NUMEL] : 0,
                          dtype_of(row[PACKED], GRAD_DTYPE)});
    return norm_of(pieces);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "squared_norm", &pyops::squared_norm);
    PYOPS_IMPL(m, "squared_norm_from_table", &pyops::squared_norm_from_table);
}
