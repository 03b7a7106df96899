// A step of any elementwise rule over a list of tensors or over their table: checks, what depends
// on the step, one parallel region.
#pragma once
#include <cstring>

#include "../kernels.h"
#include "../calls/loop.h"
#include "../../host/optimizers/table.h"
#include "../../host/optimizers/unpack.h"

namespace pyops {

// From here on (12 bytes and more each) no cache keeps a step's parameters until they are read
// again.
constexpr int64_t STREAMED_NUMEL = 4 << 20;

inline double value_of(const Tensor& scalar) {
    const void* data = scalar.data_ptr();
    return dtype_code(scalar) == FP64 ? *static_cast<const double*>(data)
                                      : *static_cast<const float*>(data);
}

inline void* moved(const int64_t* row, Column column, Field field, int64_t elements) {
    char* base = reinterpret_cast<char*>(row[column]);
    return base ? base + elements * (dtype_of(row[PACKED], field) == FP32 ? 4 : 2) : nullptr;
}

inline StepSpan span_of(const int64_t* row, int64_t begin, int64_t end, uint32_t step,
                        const StepContext& context, bool streams) {
    StepSpan span;
    span.param = moved(row, PARAM, PARAM_DTYPE, begin);
    span.grad = moved(row, GRAD, GRAD_DTYPE, begin);
    span.exp_avg = moved(row, EXP_AVG, MOMENT_DTYPE, begin);
    span.exp_avg_sq = moved(row, EXP_AVG_SQ, MOMENT_DTYPE, begin);
    span.max = moved(row, MAX, MOMENT_DTYPE, begin);
    span.master = moved(row, MASTER, MASTER_DTYPE, begin);
    span.copy = moved(row, COPY, COPY_DTYPE, begin);
    span.n = end - begin;
    span.packed = row[PACKED];
    span.zero_grad = context.zero_grads;
    span.stochastic_rounding = context.stochastic_rounding;
    span.streams = streams;
    span.seed = context.seed;
    span.index = static_cast<uint64_t>(row[OFFSET] + begin);
    span.step = step;
    return span;
}

// Steps are per row, but nearly always equal: what depends on them is worked out once per value.
template <typename Rule>
struct Steps {
    std::vector<float> values;
    std::vector<Rule> rules;
    std::vector<int32_t> of_row;

    Steps(const int64_t* table, int64_t rows, const typename Rule::Options& options, double factor)
        : of_row(static_cast<size_t>(rows)) {
        int32_t last = -1;
        for (int64_t r = 0; r < rows; ++r) {
            float* step = reinterpret_cast<float*>(table[r * COLUMNS + STEP]);
            const float value = step ? *step + 1.0f : 0.0f;
            if (step) *step = value;
            if (last < 0 || values[static_cast<size_t>(last)] != value)
                last = find(value, options, factor);
            of_row[static_cast<size_t>(r)] = last;
        }
    }

    int32_t find(float value, const typename Rule::Options& options, double factor) {
        for (size_t k = 0; k < values.size(); ++k)
            if (values[k] == value) return static_cast<int32_t>(k);
        values.push_back(value);
        rules.emplace_back(options, factor, static_cast<double>(value));
        return static_cast<int32_t>(values.size()) - 1;
    }
};

inline void zero_gradients(const int64_t* table, int64_t rows) {
    for_each_span(
        rows, [=](int64_t r) { return table[r * COLUMNS + NUMEL]; },
        [=](int64_t r, int64_t begin, int64_t end) {
            const int64_t* row = table + r * COLUMNS;
            const size_t size = dtype_of(row[PACKED], GRAD_DTYPE) == FP32 ? 4 : 2;
            std::memset(moved(row, GRAD, GRAD_DTYPE, begin), 0,
                        static_cast<size_t>(end - begin) * size);
        });
}

template <typename Rule>
void step_rows(const int64_t* table, int64_t rows, typename Rule::Options options,
               const StepContext& context) {
    check_scalar(context.lr, "lr_tensor", false, true);
    check_scalar(context.grad_factor, "grad_factor", false, false);
    check_scalar(context.found_inf, "found_inf", false, false);
    if (context.found_inf && value_of(*context.found_inf) != 0.0) {
        if (context.zero_grads) zero_gradients(table, rows);
        return;
    }
    if (context.lr) options.lr = value_of(*context.lr);
    const Steps<Rule> steps(table, rows, options,
                            context.grad_factor ? value_of(*context.grad_factor) : 1.0);
    const Kernels& kernel = kernels();
    int64_t numel = 0;
    for (int64_t r = 0; r < rows; ++r) numel += table[r * COLUMNS + NUMEL];
    for_each_span(
        rows, [=](int64_t r) { return table[r * COLUMNS + NUMEL]; },
        [&](int64_t r, int64_t begin, int64_t end) {
            const size_t k = static_cast<size_t>(steps.of_row[static_cast<size_t>(r)]);
            const uint32_t step = static_cast<uint32_t>(steps.values[k]);
            step_span(
                kernel,
                span_of(table + r * COLUMNS, begin, end, step, context, numel >= STREAMED_NUMEL),
                steps.rules[k]);
        });
}

// What csrc/host/optimizers/unpack.h calls.
struct Cpu {
    template <template <typename> class R>
    static void step(const TensorLists& lists, const std::vector<int64_t>& offsets,
                     const typename R<float>::Options& options, const StepContext& context,
                     const char* op) {
        const std::vector<int64_t> table = make_table(lists, offsets, REQUIRED<R<float>>, op);
        step_rows<R<float>>(table.data(), static_cast<int64_t>(lists.params->size()), options,
                            context);
    }

    template <template <typename> class R>
    static void step_table(const Tensor& table, const typename R<float>::Options& options,
                           const StepContext& context, const char* op) {
        const int64_t rows = check_table(table, op);
        const int64_t* data = static_cast<const int64_t*>(table.data_ptr());
        check_columns(data, rows, REQUIRED<R<float>>, op);
        step_rows<R<float>>(data, rows, options, context);
    }
};

}  // namespace pyops
