// Adafactor on a band of rows for each instruction set: sums of squares by row and column, the
// update's norm, the step.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

double squared_sum_kernel(const void*, int64_t, int);

namespace {

// Calls f(row, first column, offset in the band, n) for tiles of rows.
template <typename F>
void for_each_tile(const FactoredBand& band, const F& f) {
    for (int64_t row = 0; row < band.rows; ++row)
        for (int64_t start = 0; start < band.columns; start += TILE)
            f(row, start, row * band.columns + start,
              band.columns - start < TILE ? band.columns - start : TILE);
}

struct Gradient {
    const StepSpan& span;
    int dtype;
    float scratch[TILE];
    explicit Gradient(const StepSpan& s) : span(s), dtype(dtype_of(s.packed, GRAD_DTYPE)) {}
    const float* tile(int64_t start, int64_t n) {
        return as_fp32(scratch, at(span.grad, start, dtype), n, dtype);
    }
};

void update_of(const Factored<float>& rule, float* out, const float* g, float row_root,
               const float* column_roots, int64_t n) {
    const Factored<Vec> wide(rule);
    const Vec wide_root(row_root);
    const auto one = [=](const auto& r, auto root, auto lane, int64_t i)
                         __attribute__((always_inline)) {
                             typename decltype(lane)::type gradient, column;
                             load(gradient, g + i);
                             load(column, column_roots + i);
                             store(out + i, r.update(gradient, root, column));
                         };
    int64_t i = 0;
    if (WIDTH<Vec> > 1)
        i = sweep<Vec>(0, n, [&](auto lane, int64_t k) __attribute__((always_inline)) {
            one(wide, wide_root, lane, k);
        });
    sweep<float>(i, n, [&](auto lane, int64_t k) __attribute__((always_inline)) {
        one(rule, row_root, lane, k);
    });
}

void move(const Factored<float>& rule, float* p, const float* update, int64_t n) {
    const Factored<Vec> wide(rule);
    const auto one = [=](const auto& r, auto lane, int64_t i) __attribute__((always_inline)) {
        typename decltype(lane)::type value, step;
        load(value, p + i);
        load(step, update + i);
        store(p + i, r.moved(value, step));
    };
    int64_t i = 0;
    if (WIDTH<Vec> > 1)
        i = sweep<Vec>(
            0, n, [&](auto lane, int64_t k) __attribute__((always_inline)) { one(wide, lane, k); });
    sweep<float>(i, n,
                 [&](auto lane, int64_t k) __attribute__((always_inline)) { one(rule, lane, k); });
}

// From the tile that was computed to everything that is stored beside it.
void finish(const StepSpan& span, Operand& p, const float* result, float* again, int64_t start,
            int64_t n) {
    const int param_dtype = dtype_of(span.packed, PARAM_DTYPE),
              grad_dtype = dtype_of(span.packed, GRAD_DTYPE);
    p.store_tile(result, start, n, span, span.master ? NO_STREAM : P_STREAM);
    if (p.dtype != FP32 && (span.master || span.copy))
        result = as_fp32(again, at(p.base, start, p.dtype), n, p.dtype);
    if (span.master) {
        from_fp32(at(span.param, start, param_dtype), result, n, param_dtype);
        if (span.copy) result = as_fp32(again, at(span.param, start, param_dtype), n, param_dtype);
    }
    if (span.copy) {
        const int copy_dtype = dtype_of(span.packed, COPY_DTYPE);
        from_fp32(at(span.copy, start, copy_dtype), result, n, copy_dtype);
    }
    if (span.zero_grad)
        memset(at(span.grad, start, grad_dtype), 0, static_cast<size_t>(n * size_of(grad_dtype)));
}

}  // namespace

// row_sums [rows] and column_sums [columns] receive the sums; the order is that of the rows and of
// the tiles.
void factor_sums_kernel(const FactoredBand& band, double* row_sums, double* column_sums) {
    Gradient gradient(band.span);
    for (int64_t k = 0; k < band.columns; ++k) column_sums[k] = 0.0;
    for (int64_t r = 0; r < band.rows; ++r) row_sums[r] = 0.0;
    for_each_tile(band, [&](int64_t row, int64_t column, int64_t start, int64_t n) {
        const float* const g = gradient.tile(start, n);
        double* const sums = column_sums + column;
        row_sums[row] += squared_sum_kernel(g, n, FP32);
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i)
            sums[i] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
    });
}

void variance_roots_kernel(const FactoredBand& band, float* variance, float* roots, double weight) {
    Gradient gradient(band.span);
    for_each_tile(band, [&](int64_t, int64_t column, int64_t start, int64_t n) {
        const float* const g = gradient.tile(start, n);
        float *const v = variance + column, *const root = roots + column;
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i) {
            const double scaled = static_cast<double>(g[i]) * static_cast<double>(band.rule.factor);
            v[i] = moved_towards(v[i], scaled * scaled, weight);
            root[i] = sqrtf(v[i]);
        }
    });
}

double factored_squares_kernel(const FactoredBand& band) {
    Gradient gradient(band.span);
    float update[TILE];
    double sum = 0.0;
    for_each_tile(band, [&](int64_t row, int64_t column, int64_t start, int64_t n) {
        update_of(band.rule, update, gradient.tile(start, n), band.row_roots[row],
                  band.column_roots + column, n);
        sum += squared_sum_kernel(update, n, FP32);
    });
    return sum;
}

void factored_apply_kernel(const FactoredBand& band) {
    const StepSpan& span = band.span;
    Gradient gradient(span);
    float update[TILE], again[TILE];
    Operand p;
    p.base = span.master ? span.master : span.param;
    p.dtype = dtype_of(span.packed, span.master ? MASTER_DTYPE : PARAM_DTYPE);
    for_each_tile(band, [&](int64_t row, int64_t column, int64_t start, int64_t n) {
        update_of(band.rule, update, gradient.tile(start, n), band.row_roots[row],
                  band.column_roots + column, n);
        float* const value = p.load_tile(start, n);
        move(band.rule, value, update, n);
        finish(span, p, value, again, start, n);
    });
}

}  // namespace pyops::PYOPS_ISA
