// One step of SGD on one element, with or without momentum: pyops/ops/optimizers/sgd.py states the
// formula and its sources.
#pragma once
#include "rule.h"

namespace pyops {

struct SgdOptions {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
};

// The momentum buffer is the column EXP_AVG.
template <typename T, bool MOMENTUM>
struct Sgd {
    using Options = SgdOptions;
    static constexpr unsigned COLUMNS =
        MOMENTUM ? set_of(PARAM, GRAD, EXP_AVG) : set_of(PARAM, GRAD);
    static constexpr unsigned WRITTEN = MOMENTUM ? set_of(PARAM, EXP_AVG) : set_of(PARAM);
    static constexpr bool COUNTS = true;
    static constexpr int L2 = 1, NESTEROV = 2, WITH_MAX = 0, VARIANTS = MOMENTUM ? 4 : 2;

    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T l2, rate;
    T momentum;
    // Of the buffer and of the gradient; the first step puts the whole gradient in an empty buffer
    T keep, add;
    bool nesterov;

    Sgd() = default;

    PYOPS_HOST_DEVICE Sgd(const SgdOptions& o, double grad_factor, double step)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          l2(static_cast<T>(o.weight_decay)), rate(static_cast<T>(o.lr)),
          momentum(static_cast<T>(o.momentum)),
          keep(static_cast<T>(step == 1.0 ? 0.0 : o.momentum)),
          add(static_cast<T>(step == 1.0 ? 1.0 : 1.0 - o.dampening)), nesterov(o.nesterov) {}

    template <typename U>
    explicit PYOPS_HOST_DEVICE Sgd(const Sgd<U, MOMENTUM>& s)
        : factor(s.factor), l2(s.l2), rate(s.rate), momentum(s.momentum), keep(s.keep), add(s.add),
          nesterov(s.nesterov) {}

    PYOPS_HOST_DEVICE int variant() const {
        return (l2 != T(0) ? L2 : 0) | (MOMENTUM && nesterov ? NESTEROV : 0);
    }

    template <int VARIANT>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T& m, T&, T&) const {
        g = g * factor;
        if constexpr (VARIANT & L2) g = fused(l2, p, g);
        if constexpr (MOMENTUM) {
            m = fused(keep, m, add * g);
            if constexpr (VARIANT & NESTEROV)
                g = fused(momentum, m, g);
            else
                g = m;
        }
        p = negative_fused(rate, g, p);
    }
};

template <typename T>
using PlainSgd = Sgd<T, false>;
template <typename T>
using MomentumSgd = Sgd<T, true>;

}  // namespace pyops
