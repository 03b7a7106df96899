// LAMB for each instruction set: the first pass over a stretch of a row, which leaves its squared
// norms, and the second.
#include "step_kernel.h"

namespace pyops::PYOPS_ISA {

double squared_sum_kernel(const void*, int64_t, int);

namespace {

template <typename F>
inline __attribute__((always_inline)) void with_both(int64_t n, const Lamb<float>& scalars,
                                                     const F& f) {
    const Lamb<Vec> wide(scalars);
    const Lamb<float> narrow(scalars);
    int64_t i = 0;
    if (WIDTH<Vec> > 1)
        i = sweep<Vec>(
            0, n, [&](auto lane, int64_t k) __attribute__((always_inline)) { f(wide, lane, k); });
    sweep<float>(i, n,
                 [&](auto lane, int64_t k) __attribute__((always_inline)) { f(narrow, lane, k); });
}

void moments_of(const Lamb<float>& scalars, const float* g, float* m, float* v, int64_t n) {
    with_both(n, scalars,
              [=](const auto& rule, auto lane, int64_t i) __attribute__((always_inline)) {
                  typename decltype(lane)::type gradient, first, second;
                  load(gradient, g + i);
                  load(first, m + i);
                  load(second, v + i);
                  rule.moments(gradient, first, second);
                  store(m + i, first);
                  store(v + i, second);
              });
}

void update_of(const Lamb<float>& scalars, float* out, const float* p, const float* m,
               const float* v, int64_t n) {
    with_both(n, scalars,
              [=](const auto& rule, auto lane, int64_t i) __attribute__((always_inline)) {
                  typename decltype(lane)::type parameter, first, second;
                  load(parameter, p + i);
                  load(first, m + i);
                  load(second, v + i);
                  store(out + i, rule.update(parameter, first, second));
              });
}

}  // namespace

// The tiles' sums are added in their order: the same bits whoever works on the span.
void lamb_moments_kernel(const StepSpan& span, const Lamb<float>& rule, double* squared_norms) {
    const int grad_dtype = dtype_of(span.packed, GRAD_DTYPE);
    float gradient[TILE], update[TILE];
    Operand p, m, v;
    p.base = span.master ? span.master : span.param;
    p.dtype = dtype_of(span.packed, span.master ? MASTER_DTYPE : PARAM_DTYPE);
    m.base = span.exp_avg;
    v.base = span.exp_avg_sq;
    m.dtype = v.dtype = dtype_of(span.packed, MOMENT_DTYPE);
    squared_norms[0] = squared_norms[1] = 0.0;
    for (int64_t start = 0; start < span.n; start += TILE) {
        const int64_t n = span.n - start < TILE ? span.n - start : TILE;
        const float* const g = as_fp32(gradient, at(span.grad, start, grad_dtype), n, grad_dtype);
        float *first = m.load_tile(start, n), *second = v.load_tile(start, n);
        moments_of(rule, g, first, second, n);
        m.store_tile(first, start, n, span, M_STREAM);
        v.store_tile(second, start, n, span, V_STREAM);
        if (m.dtype != FP32) {  // the second pass will see the rounded ones
            first = m.load_tile(start, n);
            second = v.load_tile(start, n);
        }
        const float* const parameter = p.load_tile(start, n);
        update_of(rule, update, parameter, first, second, n);
        squared_norms[0] += squared_sum_kernel(parameter, n, FP32);
        squared_norms[1] += squared_sum_kernel(update, n, FP32);
        if (span.zero_grad)
            memset(at(span.grad, start, grad_dtype), 0,
                   static_cast<size_t>(n * size_of(grad_dtype)));
    }
}

void lamb_apply_kernel(const StepSpan& span, const LambApply<float>& rule) {
    step_in_memory<LambApply>(span, rule);
}

}  // namespace pyops::PYOPS_ISA
