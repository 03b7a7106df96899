// What the layer-wise optimizers share on the CPU: rows cut into blocks, whose squared norms are
// added in their order.
//
//   blocks  |---- row 0 ----|-- row 1 --|r2|------ row 3 ------|   BLOCK elements or the row's rest
//           first pass, in parallel -> partial sums -> norms[row]
//           -> second pass, in parallel, last blocks first
//
// A norm's bits depend on its row's length alone: not on threads, and not on what other rows there
// are.
#pragma once
#include <vector>

#include "../../math/optimizers/lamb.h"
#include "../../math/optimizers/lars.h"
#include "step.h"

namespace pyops {

constexpr int64_t LAYER_BLOCK = 16384;  // elements
enum Passes : int64_t { FIRST_PASS = 1, SECOND_PASS = 2 };

struct LayerBlock {
    int64_t row, begin, end;
};

struct SquaredNorms {
    double param, other;
};

inline std::vector<LayerBlock> layer_blocks(const int64_t* table, int64_t rows) {
    std::vector<LayerBlock> blocks;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t n = table[r * COLUMNS + NUMEL];
        for (int64_t begin = 0; begin < n; begin += LAYER_BLOCK)
            blocks.push_back({r, begin, std::min(n, begin + LAYER_BLOCK)});
    }
    return blocks;
}

// Calls f(block number, block) for each; `backwards` begins with what the pass before touched last.
template <typename F>
void for_each_block(const std::vector<LayerBlock>& blocks, bool backwards, const F& f) {
    const auto run = [&](int64_t first, int64_t last) {
        for (int64_t k = first; k < last; ++k) {
            const size_t b = static_cast<size_t>(backwards ? first + last - 1 - k : k);
            f(b, blocks[b]);
        }
    };
    const int64_t count = static_cast<int64_t>(blocks.size());
    if (count <= 2)
        run(0, count);
    else
        torch::stable::parallel_for(0, count, 1, run);
}

// float64 [rows, 2], contiguous, in the CPU's memory; throws otherwise.
inline SquaredNorms* norms_of(const Tensor& norms, int64_t rows, bool on_cuda, const char* op) {
    require(dtype_code(norms) == FP64 && norms.dim() == 2 && norms.size(0) == rows &&
                norms.size(1) == 2 && norms.is_contiguous() && norms.is_cuda() == on_cuda,
            "pyops::", op, ": norms must be a contiguous float64 [", rows,
            ", 2] on the parameters' device, got shape ", Shape{norms});
    return static_cast<SquaredNorms*>(norms.data_ptr());
}

inline void check_passes(int64_t passes, const char* op) {
    require(passes >= FIRST_PASS && passes <= (FIRST_PASS | SECOND_PASS), "pyops::", op,
            ": passes must be 1 (norms), 2 (apply) or 3 (both), got ", passes);
}

// Sums of the blocks of each row, in their order.
inline void add_up(const std::vector<LayerBlock>& blocks, const std::vector<SquaredNorms>& partial,
                   SquaredNorms* norms, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) norms[r] = {0.0, 0.0};
    for (size_t b = 0; b < blocks.size(); ++b) {
        norms[blocks[b].row].param += partial[b].param;
        norms[blocks[b].row].other += partial[b].other;
    }
}

// The number of a row's step that is being taken; written back once, by the last pass. Rows that
// follow each other may be layers of one parameter, and share its step.
inline float step_of(const int64_t* row) {
    return *reinterpret_cast<const float*>(row[STEP]) + 1.0f;
}
inline void count_steps(const int64_t* table, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t step = table[r * COLUMNS + STEP];
        if (r == 0 || step != table[(r - 1) * COLUMNS + STEP])
            *reinterpret_cast<float*>(step) += 1.0f;
    }
}

// What stands between an op and its passes: scalars checked, lr and the factor read; false when the
// step is to be skipped.
inline bool prepare_layers(const int64_t* table, int64_t rows, double& lr, double& factor,
                           const StepContext& context) {
    check_scalar(context.lr, "lr_tensor", false, true);
    check_scalar(context.grad_factor, "grad_factor", false, false);
    check_scalar(context.found_inf, "found_inf", false, false);
    if (context.found_inf && value_of(*context.found_inf) != 0.0) {
        if (context.zero_grads) zero_gradients(table, rows);
        return false;
    }
    if (context.lr) lr = value_of(*context.lr);
    factor = context.grad_factor ? value_of(*context.grad_factor) : 1.0;
    return true;
}

struct CpuRows {
    const int64_t* table;
    int64_t count;
};

// What csrc/host/optimizers/lamb_ops.h and lars_ops.h call.
struct LayersOnCpu {
    template <typename F>
    static void with_lists(const TensorLists& lists, const std::vector<int64_t>& offsets,
                           unsigned required, const char* op, const F& f) {
        const std::vector<int64_t> table = make_table(lists, offsets, required, op);
        f(CpuRows{table.data(), static_cast<int64_t>(lists.params->size())});
    }

    template <typename F>
    static void with_table(const Tensor& table, unsigned required, const char* op, const F& f) {
        const int64_t rows = check_table(table, op);
        const int64_t* data = static_cast<const int64_t*>(table.data_ptr());
        check_columns(data, rows, required, op);
        f(CpuRows{data, rows});
    }

    static void lamb(const CpuRows& rows, const Tensor& norms, LambOptions options,
                     const StepContext& context, int64_t passes, const char* op);
    static void lars(const CpuRows& rows, const Tensor& norms, LarsOptions options,
                     const StepContext& context, int64_t passes, const char* op);
};

}  // namespace pyops
