// One step of Lion on one element: pyops/ops/optimizers/lion.py states the formula and its source.
#pragma once
#include "rule.h"

namespace pyops {

struct LionOptions {
    double lr, beta1, beta2, weight_decay;
    bool maximize;
};

template <typename T>
struct Lion {
    using Options = LionOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, GRAD, EXP_AVG),
                              WRITTEN = set_of(PARAM, EXP_AVG);
    static constexpr bool COUNTS = true;
    static constexpr int WITH_MAX = 0, VARIANTS = 1;

    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T beta1, one_minus_beta1, beta2, one_minus_beta2;
    T rate, decay;

    Lion() = default;

    PYOPS_HOST_DEVICE Lion(const LionOptions& o, double grad_factor, double)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          beta1(static_cast<T>(o.beta1)), one_minus_beta1(static_cast<T>(1.0 - o.beta1)),
          beta2(static_cast<T>(o.beta2)), one_minus_beta2(static_cast<T>(1.0 - o.beta2)),
          rate(static_cast<T>(o.lr)), decay(static_cast<T>(1.0 - o.lr * o.weight_decay)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE Lion(const Lion<U>& l)
        : factor(l.factor), beta1(l.beta1), one_minus_beta1(l.one_minus_beta1), beta2(l.beta2),
          one_minus_beta2(l.one_minus_beta2), rate(l.rate), decay(l.decay) {}

    PYOPS_HOST_DEVICE int variant() const { return 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T& m, T&, T&) const {
        g = g * factor;
        const T direction = sign_of(fused(beta1, m, one_minus_beta1 * g));
        m = fused(beta2, m, one_minus_beta2 * g);
        p = negative_fused(rate, direction, p * decay);
    }
};

}  // namespace pyops
