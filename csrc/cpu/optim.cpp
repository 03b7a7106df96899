// Adam over a list of tensors or over their table: checks, what depends on the step, one parallel region.
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "loop.h"
#include "table.h"

namespace pyops {
namespace {

// From here on (28 bytes and more each) no cache keeps a step's parameters until they are read again.
constexpr int64_t STREAMED_NUMEL = 4 << 20;
constexpr unsigned ADAM_COLUMNS = OF_ANY_RULE | set_of(EXP_AVG, EXP_AVG_SQ);

struct Options {
    AdamOptions adam;
    bool zero_grads, stochastic_rounding;
    uint64_t seed;
    bool streams = false;
};

double value_of(const Tensor& scalar) {
    const void* data = scalar.data_ptr();
    return dtype_code(scalar) == FP64 ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
}

template <typename T>
T* pointer(const int64_t* row, Column column) {
    return reinterpret_cast<T*>(row[column]);
}

void* moved(const int64_t* row, Column column, Field field, int64_t elements) {
    char* base = pointer<char>(row, column);
    return base ? base + elements * (dtype_of(row[PACKED], field) == FP32 ? 4 : 2) : nullptr;
}

AdamSpan span_of(const int64_t* row, int64_t begin, int64_t end, uint32_t step, const Options& options) {
    AdamSpan span;
    span.param = moved(row, PARAM, PARAM_DTYPE, begin);
    span.grad = moved(row, GRAD, GRAD_DTYPE, begin);
    span.exp_avg = moved(row, EXP_AVG, MOMENT_DTYPE, begin);
    span.exp_avg_sq = moved(row, EXP_AVG_SQ, MOMENT_DTYPE, begin);
    span.max = moved(row, MAX, MOMENT_DTYPE, begin);
    span.master = moved(row, MASTER, MASTER_DTYPE, begin);
    span.copy = moved(row, COPY, COPY_DTYPE, begin);
    span.n = end - begin;
    span.packed = row[PACKED];
    span.l2 = !options.adam.decoupled && options.adam.weight_decay != 0.0;
    span.zero_grad = options.zero_grads;
    span.stochastic_rounding = options.stochastic_rounding;
    span.streams = options.streams;
    span.seed = options.seed;
    span.index = static_cast<uint64_t>(row[OFFSET] + begin);
    span.step = step;
    return span;
}

// Steps are per row, but nearly always equal: what depends on them is worked out once per value.
struct Steps {
    std::vector<float> values;
    std::vector<Adam<float>> adams;
    std::vector<int32_t> of_row;

    Steps(const int64_t* table, int64_t rows, const AdamOptions& options, double factor) : of_row(static_cast<size_t>(rows)) {
        int32_t last = -1;
        for (int64_t r = 0; r < rows; ++r) {
            float* step = pointer<float>(table + r * COLUMNS, STEP);
            const float value = *step + 1.0f;
            *step = value;
            if (last < 0 || values[static_cast<size_t>(last)] != value) last = find(value, options, factor);
            of_row[static_cast<size_t>(r)] = last;
        }
    }

    int32_t find(float value, const AdamOptions& o, double factor) {
        for (size_t k = 0; k < values.size(); ++k)
            if (values[k] == value) return static_cast<int32_t>(k);
        values.push_back(value);
        adams.emplace_back(o, factor, std::pow(o.beta1, static_cast<double>(value)), std::pow(o.beta2, static_cast<double>(value)));
        return static_cast<int32_t>(values.size()) - 1;
    }
};

void zero_gradients(const int64_t* table, int64_t rows) {
    for_each_span(
        rows, [=](int64_t r) { return table[r * COLUMNS + NUMEL]; },
        [=](int64_t r, int64_t begin, int64_t end) {
            const int64_t* row = table + r * COLUMNS;
            const size_t size = dtype_of(row[PACKED], GRAD_DTYPE) == FP32 ? 4 : 2;
            std::memset(moved(row, GRAD, GRAD_DTYPE, begin), 0, static_cast<size_t>(end - begin) * size);
        });
}

void run(const int64_t* table, int64_t rows, const std::optional<Tensor>& lr, const std::optional<Tensor>& grad_factor,
         const std::optional<Tensor>& found_inf, Options options) {
    check_scalar(lr, "lr_tensor", false, true);
    check_scalar(grad_factor, "grad_factor", false, false);
    check_scalar(found_inf, "found_inf", false, false);
    if (found_inf && value_of(*found_inf) != 0.0) {
        if (options.zero_grads) zero_gradients(table, rows);
        return;
    }
    if (lr) options.adam.lr = value_of(*lr);
    const Steps steps(table, rows, options.adam, grad_factor ? value_of(*grad_factor) : 1.0);
    const Kernels& kernel = kernels();
    int64_t numel = 0;
    for (int64_t r = 0; r < rows; ++r) numel += table[r * COLUMNS + NUMEL];
    options.streams = numel >= STREAMED_NUMEL;
    for_each_span(
        rows, [=](int64_t r) { return table[r * COLUMNS + NUMEL]; },
        [&](int64_t r, int64_t begin, int64_t end) {
            const size_t k = static_cast<size_t>(steps.of_row[static_cast<size_t>(r)]);
            const uint32_t step = static_cast<uint32_t>(steps.values[k]);
            kernel.adam(span_of(table + r * COLUMNS, begin, end, step, options), steps.adams[k]);
        });
}

void adam_(const Tensors params, const Tensors grads, const Tensors exp_avgs, const Tensors exp_avg_sqs,
           const Tensors max_exp_avg_sqs, const Tensors masters, const Tensors copies, const Tensors steps,
           const std::optional<Tensor> lr_tensor, const std::optional<Tensor> grad_factor, const std::optional<Tensor> found_inf,
           double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize, bool zero_grads,
           bool stochastic_rounding, int64_t seed, const std::vector<int64_t> offsets) {
    const std::vector<int64_t> table = make_table(
        {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &masters, &copies, &steps}, offsets, ADAM_COLUMNS, "adam_");
    run(table.data(), static_cast<int64_t>(params.size()), lr_tensor, grad_factor, found_inf,
        {{lr, beta1, beta2, eps, weight_decay, decoupled, maximize}, zero_grads, stochastic_rounding, static_cast<uint64_t>(seed)});
}

void adam_from_table_(const Tensor table, const std::optional<Tensor> lr_tensor, const std::optional<Tensor> grad_factor,
                      const std::optional<Tensor> found_inf, double lr, double beta1, double beta2, double eps,
                      double weight_decay, bool decoupled, bool maximize, bool zero_grads, bool stochastic_rounding, int64_t seed) {
    const int64_t rows = check_table(table, "adam_from_table_");
    const int64_t* data = static_cast<const int64_t*>(table.data_ptr());
    check_columns(data, rows, ADAM_COLUMNS, "adam_from_table_");
    run(data, rows, lr_tensor, grad_factor, found_inf,
        {{lr, beta1, beta2, eps, weight_decay, decoupled, maximize}, zero_grads, stochastic_rounding, static_cast<uint64_t>(seed)});
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("adam_", TORCH_BOX(&pyops::adam_));
    m.impl("adam_from_table_", TORCH_BOX(&pyops::adam_from_table_));
}
