// Adafactor on the CPU: three passes over bands of all tensors, small sums between them.
//
//   1  bands    sums of g^2 by row and column, of p^2          (vectors: their variance)
//      layers   row_var, col_var, and the roots of their quotients
//   2  bands    sum of update^2
//      layers   relative step, clipped
//   3  bands    update anew, parameter
//
// A band is some whole rows of one matrix. Bands depend on shapes alone and are added in their
// order: threads change no bit.
#include <cmath>

#include "../../math/optimizers/adafactor.h"
#include "../../host/box.h"
#include "layer.h"

namespace pyops {
namespace {

constexpr int64_t BAND = 65536;  // elements

struct Layer {
    const int64_t* row;
    int64_t matrices, rows, columns;  // a vector: 1 x 1 x n
    float *row_var, *col_var, *variance;
    double weight, least;                        // of the new means; the least root
    std::vector<float> row_roots, column_roots;  // of all matrices
    std::vector<double> row_sums;
    double squared_param = 0.0, squared_update = 0.0;
    Factored<float> rule{};
    float step;

    int64_t numel() const { return row[NUMEL]; }
    bool factored() const { return variance == nullptr; }
};

struct Band {
    size_t layer;
    int64_t matrix, first_row, rows, begin, columns, first_column;  // begin: of its elements
    size_t column_sums;                                             // where its own begin
    double squared_param = 0.0, squared_update = 0.0;
};

float* moment(const Tensors& list, size_t i, int64_t numel, const char* name) {
    require(i < list.size() && dtype_code(list[i]) == FP32 && list[i].numel() == numel &&
                list[i].is_contiguous() && list[i].is_cpu(),
            "pyops::adafactor_: ", name, "[", i, "] must be a contiguous float32 tensor of ", numel,
            " elements");
    return static_cast<float*>(list[i].data_ptr());
}

std::vector<Layer> layers_of(const int64_t* table, const Tensors& params, const Tensors& row_vars,
                             const Tensors& col_vars, const Tensors& variances,
                             const AdafactorOptions& options) {
    std::vector<Layer> layers(params.size());
    for (size_t i = 0; i < params.size(); ++i) {
        Layer& l = layers[i];
        const Tensor& p = params[i];
        require(p.is_contiguous(), "pyops::adafactor_: params[", i, "] has shape ", Shape{p},
                ": rows and columns need it contiguous");
        l.row = table + i * COLUMNS;
        const int64_t dims = p.dim(), n = p.numel();
        l.rows = dims > 1 ? p.size(dims - 2) : 1;
        l.columns = dims > 1 ? p.size(dims - 1) : n;
        l.matrices = n ? n / (l.rows * l.columns) : 0;
        l.variance = l.row_var = l.col_var = nullptr;
        if (dims > 1) {
            l.row_var = n ? moment(row_vars, i, l.matrices * l.rows, "row_vars") : nullptr;
            l.col_var = n ? moment(col_vars, i, l.matrices * l.columns, "col_vars") : nullptr;
        } else {
            l.variance = moment(variances, i, n, "variances");
        }
        const int dtype = dtype_of(l.row[PACKED], l.row[MASTER] ? MASTER_DTYPE : PARAM_DTYPE);
        l.least = options.eps1 >= 0.0 ? options.eps1
                  : dtype == FP32     ? 0x1p-23
                  : dtype == BF16     ? 0x1p-7
                                      : 0x1p-10;
        l.step = step_of(l.row);
        l.weight = weight_of(options, l.step);
        l.row_roots.assign(static_cast<size_t>(l.matrices * l.rows), 1.0f);
        l.column_roots.resize(static_cast<size_t>(l.matrices * l.columns));
        if (dims > 1) l.row_sums.resize(l.row_roots.size());
    }
    return layers;
}

std::vector<Band> bands_of(const std::vector<Layer>& layers, size_t& column_sums) {
    std::vector<Band> bands;
    column_sums = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        const Layer& l = layers[i];
        if (!l.factored()) {
            for (int64_t begin = 0; begin < l.columns; begin += BAND)
                bands.push_back({i, 0, 0, 1, begin, std::min(BAND, l.columns - begin), begin, 0});
            continue;
        }
        const int64_t height = std::max<int64_t>(1, BAND / std::max<int64_t>(1, l.columns));
        for (int64_t k = 0; k < l.matrices; ++k)
            for (int64_t first = 0; first < l.rows; first += height) {
                bands.push_back({i, k, first, std::min(height, l.rows - first),
                                 (k * l.rows + first) * l.columns, l.columns, 0, column_sums});
                column_sums += static_cast<size_t>(l.columns);
            }
    }
    return bands;
}

FactoredBand band_of(const Layer& l, const Band& b, const StepContext& context, bool zero_grad) {
    FactoredBand band;
    band.span = span_of(l.row, b.begin, b.begin + b.rows * b.columns, static_cast<uint32_t>(l.step),
                        context, false);
    band.span.zero_grad = zero_grad && context.zero_grads;
    band.rows = b.rows;
    band.columns = b.columns;
    band.row_roots = l.row_roots.data() + b.matrix * l.rows + b.first_row;
    band.column_roots = l.column_roots.data() + b.matrix * l.columns + b.first_column;
    band.rule = l.rule;
    return band;
}

template <typename F>
void for_each(std::vector<Band>& bands, bool backwards, const F& f) {
    const int64_t count = static_cast<int64_t>(bands.size());
    const auto run = [&](int64_t first, int64_t last) {
        for (int64_t k = first; k < last; ++k)
            f(bands[static_cast<size_t>(backwards ? first + last - 1 - k : k)]);
    };
    if (count <= 1)
        run(0, count);
    else
        torch::stable::parallel_for(0, count, 1, run);
}

// Means of one matrix into its variances, and the roots of row / mean of rows, and of column.
void take_means(Layer& l, int64_t matrix, std::vector<double>& column_sums, double squared_factor) {
    float *const rows = l.row_var + matrix * l.rows, *const columns =
                                                         l.col_var + matrix * l.columns;
    double total = 0.0;
    for (int64_t r = 0; r < l.rows; ++r) {
        const double mean = l.row_sums[static_cast<size_t>(matrix * l.rows + r)] * squared_factor /
                            static_cast<double>(l.columns);
        rows[r] = moved_towards(rows[r], mean, l.weight);
        total += rows[r];
    }
    const double mean = total / static_cast<double>(l.rows),
                 divisor = mean < l.least ? l.least : mean;
    for (int64_t r = 0; r < l.rows; ++r)
        l.row_roots[static_cast<size_t>(matrix * l.rows + r)] =
            static_cast<float>(std::sqrt(rows[r] / divisor));
    for (int64_t c = 0; c < l.columns; ++c) {
        columns[c] = moved_towards(
            columns[c],
            column_sums[static_cast<size_t>(c)] * squared_factor / static_cast<double>(l.rows),
            l.weight);
        l.column_roots[static_cast<size_t>(matrix * l.columns + c)] = std::sqrt(columns[c]);
    }
}

// The columns' sums over the bands of each matrix, in their order, then its means.
void take_all_means(std::vector<Layer>& layers, const std::vector<Band>& bands,
                    const std::vector<double>& sums, double squared_factor) {
    std::vector<double> column;
    for (size_t b = 0; b < bands.size(); ++b) {
        Layer& l = layers[bands[b].layer];
        l.squared_param += bands[b].squared_param;
        if (!l.factored()) continue;
        const double* mine = sums.data() + bands[b].column_sums;
        if (bands[b].first_row == 0)
            column.assign(mine, mine + l.columns);
        else
            for (int64_t c = 0; c < l.columns; ++c) column[static_cast<size_t>(c)] += mine[c];
        if (bands[b].first_row + bands[b].rows == l.rows)
            take_means(l, bands[b].matrix, column, squared_factor);
    }
}

void step(const int64_t* table, std::vector<Layer>& layers, const AdafactorOptions& options,
          double factor, const StepContext& context) {
    size_t columns = 0;
    std::vector<Band> bands = bands_of(layers, columns);
    std::vector<double> column_sums(columns);
    const Kernels& kernel = kernels();
    for (Layer& l : layers) {
        l.rule.factor = static_cast<float>(options.maximize ? -factor : factor);
        l.rule.eps = static_cast<float>(l.least);
        l.rule.decay = static_cast<float>(1.0 - options.lr * options.weight_decay);
    }
    for_each(bands, false, [&](Band& b) {
        Layer& l = layers[b.layer];
        const FactoredBand band = band_of(l, b, context, false);
        const bool master = band.span.master != nullptr;
        b.squared_param =
            kernel.squared_sum(master ? band.span.master : band.span.param, band.span.n,
                               dtype_of(l.row[PACKED], master ? MASTER_DTYPE : PARAM_DTYPE));
        if (l.factored())
            kernel.factor_sums(band, l.row_sums.data() + b.matrix * l.rows + b.first_row,
                               column_sums.data() + b.column_sums);
        else
            kernel.variance_roots(band, l.variance + b.first_column,
                                  l.column_roots.data() + b.first_column, l.weight);
    });
    take_all_means(layers, bands, column_sums, factor * factor);
    for_each(bands, true, [&](Band& b) {
        b.squared_update = kernel.factored_squares(band_of(layers[b.layer], b, context, false));
    });
    for (const Band& b : bands) layers[b.layer].squared_update += b.squared_update;
    for (Layer& l : layers)
        l.rule.scale = static_cast<float>(relative_step(
            options, l.step, l.squared_param, l.squared_update, static_cast<double>(l.numel())));
    for_each(bands, false,
             [&](Band& b) { kernel.factored_apply(band_of(layers[b.layer], b, context, true)); });
    count_steps(table, static_cast<int64_t>(layers.size()));
}

void adafactor_(const Tensors params, const Tensors grads, const Tensors row_vars,
                const Tensors col_vars, const Tensors variances, const Tensors masters,
                const Tensors copies, const Tensors steps, const Scalar lr_tensor,
                const Scalar grad_factor, const Scalar found_inf, double lr, double beta2_decay,
                double eps1, double eps2, double d, double weight_decay, bool maximize,
                bool zero_grads, bool stochastic_rounding, int64_t seed,
                const std::vector<int64_t> offsets) {
    const std::vector<int64_t> table =
        make_table({&params, &grads, &NONE, &NONE, &NONE, &masters, &copies, &steps}, offsets,
                   OF_ANY_RULE, "adafactor_");
    AdafactorOptions options{lr, beta2_decay, eps1, eps2, d, weight_decay, maximize};
    const StepContext context =
        step_context_of(lr_tensor, grad_factor, found_inf, zero_grads, stochastic_rounding, seed);
    std::vector<Layer> layers =
        layers_of(table.data(), params, row_vars, col_vars, variances, options);
    double factor = 1.0;
    if (prepare_layers(table.data(), static_cast<int64_t>(params.size()), options.lr, factor,
                       context))
        step(table.data(), layers, options, factor, context);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "adafactor_", &pyops::adafactor_); }
