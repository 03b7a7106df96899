// LARS on the CPU: the norms of each row's parameter and gradient, then SGD with a rate for each
// row.
#include "../../host/box.h"
#include "../../host/optimizers/lars_ops.h"
#include "layer.h"

namespace pyops {
namespace {

double squared_sum_of(const int64_t* row, Column column, Field field, const LayerBlock& block) {
    const int dtype = dtype_of(row[PACKED], field);
    return kernels().squared_sum(moved(row, column, field, block.begin), block.end - block.begin,
                                 dtype);
}

void measure(const int64_t* table, int64_t rows, const std::vector<LayerBlock>& blocks,
             SquaredNorms* norms) {
    std::vector<SquaredNorms> partial(blocks.size());
    for_each_block(blocks, false, [&](size_t b, const LayerBlock& block) {
        const int64_t* row = table + block.row * COLUMNS;
        partial[b].param = row[MASTER] ? squared_sum_of(row, MASTER, MASTER_DTYPE, block)
                                       : squared_sum_of(row, PARAM, PARAM_DTYPE, block);
        partial[b].other = squared_sum_of(row, GRAD, GRAD_DTYPE, block);
    });
    add_up(blocks, partial, norms, rows);
}

template <typename Rule>
void apply(const int64_t* table, int64_t rows, const std::vector<LayerBlock>& blocks,
           const LarsOptions& options, double factor, const StepContext& context,
           const SquaredNorms* norms) {
    std::vector<Rule> rules;
    int64_t numel = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const double local = local_rate(options, norms[r].param, norms[r].other, factor);
        rules.push_back(lars_rule<Rule>(options, factor, step_of(table + r * COLUMNS), local));
        numel += table[r * COLUMNS + NUMEL];
    }
    const Kernels& kernel = kernels();
    for_each_block(blocks, true, [&](size_t, const LayerBlock& block) {
        const int64_t* row = table + block.row * COLUMNS;
        const uint32_t step = static_cast<uint32_t>(step_of(row));
        step_span(kernel,
                  span_of(row, block.begin, block.end, step, context, numel >= STREAMED_NUMEL),
                  rules[static_cast<size_t>(block.row)]);
    });
    count_steps(table, rows);
}

}  // namespace

void LayersOnCpu::lars(const CpuRows& work, const Tensor& norms, LarsOptions options,
                       const StepContext& context, int64_t passes, const char* op) {
    const auto [table, rows] = work;
    check_passes(passes, op);
    SquaredNorms* const squared = norms_of(norms, rows, false, op);
    double factor = 1.0;
    if (!prepare_layers(table, rows, options.sgd.lr, factor, context)) return;
    const std::vector<LayerBlock> blocks = layer_blocks(table, rows);
    if ((passes & FIRST_PASS) && options.trust_ratio) measure(table, rows, blocks, squared);
    if ((passes & SECOND_PASS) == 0) return;
    if (options.sgd.momentum != 0.0)
        apply<MomentumSgd<float>>(table, rows, blocks, options, factor, context, squared);
    else
        apply<PlainSgd<float>>(table, rows, blocks, options, factor, context, squared);
}

}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "lars_", &pyops::LarsOps<pyops::LayersOnCpu>::lars_);
    PYOPS_IMPL(m, "lars_from_table_", &pyops::LarsOps<pyops::LayersOnCpu>::lars_from_table_);
}
