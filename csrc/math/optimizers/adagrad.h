// One step of Adagrad on one element: pyops/ops/optimizers/adagrad.py states the formula and its
// source.
#pragma once
#include "rule.h"

namespace pyops {

struct AdagradOptions {
    double lr, lr_decay, weight_decay, eps;
    bool maximize;
};

// The sum of squares is the column EXP_AVG_SQ.
template <typename T>
struct Adagrad {
    using Options = AdagradOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, GRAD, EXP_AVG_SQ),
                              WRITTEN = set_of(PARAM, EXP_AVG_SQ);
    static constexpr bool COUNTS = true;
    static constexpr int L2 = 1, WITH_MAX = 0, VARIANTS = 2;

    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T l2, rate, eps;

    Adagrad() = default;

    PYOPS_HOST_DEVICE Adagrad(const AdagradOptions& o, double grad_factor, double step)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          l2(static_cast<T>(o.weight_decay)),
          rate(static_cast<T>(o.lr / (1.0 + (step - 1.0) * o.lr_decay))),
          eps(static_cast<T>(o.eps)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE Adagrad(const Adagrad<U>& a)
        : factor(a.factor), l2(a.l2), rate(a.rate), eps(a.eps) {}

    PYOPS_HOST_DEVICE int variant() const { return l2 != T(0) ? L2 : 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T&, T& v, T&) const {
        g = g * factor;
        if constexpr (VARIANT & L2) g = fused(l2, p, g);
        v = fused(g, g, v);
        p = negative_fused(rate, g / (square_root(v) + eps), p);
    }
};

}  // namespace pyops
