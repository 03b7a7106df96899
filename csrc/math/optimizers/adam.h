// One step of Adam on one element: pyops/ops/optimizers/optim.py states the formula and its
// sources. T is the type computed in.
//
// The hyper-parameters come from the host as float64 and are rounded to T once, after everything
// that depends on the step has been worked out in float64: the inner loop has no pow, no double and
// one division.
#pragma once
#include "rule.h"

namespace pyops {

// What the caller gives, as float64.
struct AdamOptions {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled, maximize;
};

// T is float, double, or a register of them that has + - * /, square_root, larger, fused and
// negative_fused.
template <typename T>
struct Adam {
    using Options = AdamOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, GRAD, EXP_AVG, EXP_AVG_SQ),
                              WRITTEN = set_of(PARAM, EXP_AVG, EXP_AVG_SQ);
    // L2 is a variant because 0 * inf would be nan.
    static constexpr bool COUNTS = true;
    static constexpr int L2 = 1, WITH_MAX = 2, VARIANTS = 4;

    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T l2;      // weight decay added to the gradient; 0 when decoupled
    T decay;   // 1 - lr * weight decay; 1 when not decoupled
    T one_minus_beta1, beta2, one_minus_beta2;
    T step_size;  // lr / (1 - beta1^step)
    T rsqrt_bc2;  // 1 / sqrt(1 - beta2^step)
    T eps;

    Adam() = default;

    // grad_factor is 1 when nothing is to be scaled.
    PYOPS_HOST_DEVICE Adam(const AdamOptions& o, double grad_factor, double step)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          l2(static_cast<T>(o.decoupled ? 0.0 : o.weight_decay)),
          decay(static_cast<T>(o.decoupled ? 1.0 - o.lr * o.weight_decay : 1.0)),
          one_minus_beta1(static_cast<T>(1.0 - o.beta1)), beta2(static_cast<T>(o.beta2)),
          one_minus_beta2(static_cast<T>(1.0 - o.beta2)),
          step_size(static_cast<T>(o.lr / (1.0 - pow(o.beta1, step)))),
          rsqrt_bc2(static_cast<T>(1.0 / sqrt(1.0 - pow(o.beta2, step)))),
          eps(static_cast<T>(o.eps)) {}

    // The same in another type, say each number spread over a register.
    template <typename U>
    explicit PYOPS_HOST_DEVICE Adam(const Adam<U>& a)
        : factor(a.factor), l2(a.l2), decay(a.decay), one_minus_beta1(a.one_minus_beta1),
          beta2(a.beta2), one_minus_beta2(a.one_minus_beta2), step_size(a.step_size),
          rsqrt_bc2(a.rsqrt_bc2), eps(a.eps) {}

    PYOPS_HOST_DEVICE int variant() const { return l2 != T(0) ? L2 : 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T& m, T& v, T& vmax) const {
        g = g * factor;
        if constexpr (VARIANT & L2) g = fused(l2, p, g);
        m = fused(one_minus_beta1, g - m, m);
        v = fused(one_minus_beta2 * g, g, beta2 * v);
        T largest = v;
        if constexpr (VARIANT & WITH_MAX) {
            vmax = larger(v, vmax);
            largest = vmax;
        }
        const T denominator = fused(square_root(largest), rsqrt_bc2, eps);
        p = negative_fused(step_size, m / denominator, p * decay);
    }
};

}  // namespace pyops
