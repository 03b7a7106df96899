// LAMB on the CPU: two passes over the blocks of all rows, the norms of each row between them.
#include "../../host/box.h"
#include "../../host/optimizers/lamb_ops.h"
#include "layer.h"

namespace pyops {
namespace {

// Steps are nearly always equal: the powers are worked out once per run of equal ones.
std::vector<Lamb<float>> rules_of(const int64_t* table, int64_t rows, const LambOptions& options,
                                  double factor) {
    std::vector<Lamb<float>> rules;
    float last = -1.0f;
    for (int64_t r = 0; r < rows; ++r) {
        const float step = step_of(table + r * COLUMNS);
        if (step == last)
            rules.push_back(rules.back());
        else
            rules.emplace_back(options, factor, step);
        last = step;
    }
    return rules;
}

void first_pass(const int64_t* table, int64_t rows, const std::vector<LayerBlock>& blocks,
                const LambOptions& options, double factor, const StepContext& context,
                SquaredNorms* norms) {
    const std::vector<Lamb<float>> rules = rules_of(table, rows, options, factor);
    std::vector<SquaredNorms> partial(blocks.size());
    const Kernels& kernel = kernels();
    for_each_block(blocks, false, [&](size_t b, const LayerBlock& block) {
        const int64_t* row = table + block.row * COLUMNS;
        const StepSpan span = span_of(row, block.begin, block.end,
                                      static_cast<uint32_t>(step_of(row)), context, false);
        kernel.lamb_moments(span, rules[static_cast<size_t>(block.row)], &partial[b].param);
    });
    add_up(blocks, partial, norms, rows);
}

void second_pass(const int64_t* table, int64_t rows, const std::vector<LayerBlock>& blocks,
                 const LambOptions& options, StepContext context, const SquaredNorms* norms) {
    std::vector<LambApply<float>> rules;
    int64_t numel = 0;
    for (int64_t r = 0; r < rows; ++r) {
        const double ratio =
            trust_ratio(norms[r].param, norms[r].other, options.min_ratio, options.max_ratio);
        rules.emplace_back(options, step_of(table + r * COLUMNS), ratio);
        numel += table[r * COLUMNS + NUMEL];
    }
    context.zero_grads = false;  // the first pass has
    const Kernels& kernel = kernels();
    for_each_block(blocks, true, [&](size_t, const LayerBlock& block) {
        const int64_t* row = table + block.row * COLUMNS;
        const uint32_t step = static_cast<uint32_t>(step_of(row));
        step_span(kernel,
                  span_of(row, block.begin, block.end, step, context, numel >= STREAMED_NUMEL),
                  rules[static_cast<size_t>(block.row)]);
    });
}

}  // namespace

void LayersOnCpu::lamb(const CpuRows& work, const Tensor& norms, LambOptions options,
                       const StepContext& context, int64_t passes, const char* op) {
    const auto [table, rows] = work;
    check_passes(passes, op);
    SquaredNorms* const squared = norms_of(norms, rows, false, op);
    double factor = 1.0;
    if (!prepare_layers(table, rows, options.lr, factor, context)) return;
    if (!options.trust_ratio) {  // AdamW, in the last pass
        if (passes & SECOND_PASS) {
            const AdamOptions adam{options.lr,      options.beta1,        options.beta2,
                                   options.eps,     options.weight_decay, true,
                                   options.maximize};
            step_rows<Adam<float>>(table, rows, adam, context);
        }
        return;
    }
    const std::vector<LayerBlock> blocks = layer_blocks(table, rows);
    if (passes & FIRST_PASS) first_pass(table, rows, blocks, options, factor, context, squared);
    if (passes & SECOND_PASS) {
        second_pass(table, rows, blocks, options, context, squared);
        count_steps(table, rows);
    }
}

}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "lamb_", &pyops::LambOps<pyops::LayersOnCpu>::lamb_);
    PYOPS_IMPL(m, "lamb_from_table_", &pyops::LambOps<pyops::LayersOnCpu>::lamb_from_table_);
}
