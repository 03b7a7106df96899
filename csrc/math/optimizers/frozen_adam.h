// Adam in two halves, for optimizers that exchange the momentum between them and keep the variance
// as it is:
// pyops/ops/optimizers/frozen_adam.py states the formulas.
#pragma once
#include "rule.h"

namespace pyops {

struct FrozenAdamOptions {
    double lr, eps, weight_decay;
};

// The second half: the parameter moves by a momentum and a variance that are only read.
template <typename T>
struct FrozenAdam {
    using Options = FrozenAdamOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, EXP_AVG, EXP_AVG_SQ), WRITTEN = set_of(PARAM);
    static constexpr bool COUNTS = false;
    static constexpr int WITH_MAX = 0, VARIANTS = 1;

    T rate, decay, eps;

    FrozenAdam() = default;

    PYOPS_HOST_DEVICE FrozenAdam(const FrozenAdamOptions& o, double, double)
        : rate(static_cast<T>(o.lr)), decay(static_cast<T>(1.0 - o.lr * o.weight_decay)),
          eps(static_cast<T>(o.eps)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE FrozenAdam(const FrozenAdam<U>& a)
        : rate(a.rate), decay(a.decay), eps(a.eps) {}

    PYOPS_HOST_DEVICE int variant() const { return 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T, T& m, T& v, T&) const {
        p = negative_fused(rate, unless_zero(v, m / (square_root(v) + eps)), p * decay);
    }
};

struct MomentumOptions {
    double lr;  // 1 - beta
};

// The first half: the running mean of the gradient, which stands in the column PARAM. The bits are
// Adam's.
template <typename T>
struct Momentum {
    using Options = MomentumOptions;
    static constexpr unsigned COLUMNS = set_of(PARAM, GRAD), WRITTEN = set_of(PARAM);
    static constexpr bool COUNTS = false;
    static constexpr int WITH_MAX = 0, VARIANTS = 1;

    T factor, one_minus_beta;

    Momentum() = default;

    PYOPS_HOST_DEVICE Momentum(const MomentumOptions& o, double grad_factor, double)
        : factor(static_cast<T>(grad_factor)), one_minus_beta(static_cast<T>(o.lr)) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE Momentum(const Momentum<U>& a)
        : factor(a.factor), one_minus_beta(a.one_minus_beta) {}

    PYOPS_HOST_DEVICE int variant() const { return 0; }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T&, T&, T&) const {
        p = fused(one_minus_beta, g * factor - p, p);
    }
};

}  // namespace pyops
