// LAMB on one element, in the two passes between which the norms of its layer are known:
// pyops/ops/optimizers/lamb.py states the formula.
//
//   first pass    moments(g, m, v), then update(p, m, v) for its norm
//   second pass   LambApply: the update anew, times the ratio
#pragma once
#include "rule.h"

namespace pyops {

struct LambOptions {
    double lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio;
    bool trust_ratio, maximize;
};

// ||p|| / ||u|| within [least, most], from squared norms; 1 where either norm is 0: nothing to
// compare. You et al., arXiv:1904.00962, algorithm 2. A nan stays.
PYOPS_HOST_DEVICE double trust_ratio(double squared_param, double squared_update, double least,
                                     double most) {
    if (squared_param == 0.0 || squared_update == 0.0) return 1.0;
    const double ratio = sqrt(squared_param) / sqrt(squared_update);
    return ratio < least ? least : ratio > most ? most : ratio;
}

template <typename T>
struct Lamb {
    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T one_minus_beta1, beta2, one_minus_beta2;
    T inverse_bc1;  // 1 / (1 - beta1^step)
    T rsqrt_bc2;    // 1 / sqrt(1 - beta2^step)
    T eps, weight_decay;

    Lamb() = default;

    PYOPS_HOST_DEVICE Lamb(const LambOptions& o, double grad_factor, double step)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          one_minus_beta1(static_cast<T>(1.0 - o.beta1)), beta2(static_cast<T>(o.beta2)),
          one_minus_beta2(static_cast<T>(1.0 - o.beta2)),
          inverse_bc1(static_cast<T>(1.0 / (1.0 - pow(o.beta1, step)))),
          rsqrt_bc2(static_cast<T>(1.0 / sqrt(1.0 - pow(o.beta2, step)))),
          eps(static_cast<T>(o.eps)), weight_decay(static_cast<T>(o.weight_decay)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE Lamb(const Lamb<U>& a)
        : factor(a.factor), one_minus_beta1(a.one_minus_beta1), beta2(a.beta2),
          one_minus_beta2(a.one_minus_beta2), inverse_bc1(a.inverse_bc1), rsqrt_bc2(a.rsqrt_bc2),
          eps(a.eps), weight_decay(a.weight_decay) {}

    PYOPS_HOST_DEVICE void moments(T g, T& m, T& v) const {
        g = g * factor;
        m = fused(one_minus_beta1, g - m, m);
        v = fused(one_minus_beta2 * g, g, beta2 * v);
    }

    PYOPS_HOST_DEVICE T update(T p, T m, T v) const {
        const T denominator = fused(square_root(v), rsqrt_bc2, eps);
        return fused(weight_decay, p, m / denominator * inverse_bc1);
    }
};

// p - lr * ratio * update, with the operations of AdamW: a ratio of 1 gives its bits.
template <typename T>
struct LambApply {
    using Options = LambOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, EXP_AVG, EXP_AVG_SQ), WRITTEN = set_of(PARAM);
    static constexpr bool COUNTS = true;
    static constexpr int WITH_MAX = 0, VARIANTS = 1;

    T step_size, decay, rsqrt_bc2, eps;

    LambApply() = default;

    PYOPS_HOST_DEVICE LambApply(const LambOptions& o, double step, double ratio)
        : step_size(static_cast<T>(o.lr * ratio / (1.0 - pow(o.beta1, step)))),
          decay(static_cast<T>(1.0 - o.lr * ratio * o.weight_decay)),
          rsqrt_bc2(static_cast<T>(1.0 / sqrt(1.0 - pow(o.beta2, step)))),
          eps(static_cast<T>(o.eps)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE LambApply(const LambApply<U>& a)
        : step_size(a.step_size), decay(a.decay), rsqrt_bc2(a.rsqrt_bc2), eps(a.eps) {}

    PYOPS_HOST_DEVICE int variant() const { return 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T, T& m, T& v, T&) const {
        const T denominator = fused(square_root(v), rsqrt_bc2, eps);
        // Plus 0, since a step beyond 1 / weight_decay makes `decay` negative, and a pruned weight,
        // +0 times that, would be -0.
        p = negative_fused(step_size, m / denominator, fused(p, decay, T(0)));
    }
};

}  // namespace pyops
