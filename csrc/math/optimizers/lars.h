// LARS: SGD whose gradient, weight decay included, is scaled layer by layer.
// pyops/ops/optimizers/lars.py states the formula.
#pragma once
#include "sgd.h"

namespace pyops {

struct LarsOptions {
    SgdOptions sgd;
    double trust_coefficient, eps;
    bool trust_ratio;
};

// eta ||p|| / (||g|| + wd ||p|| + eps), from squared norms; 1 where either norm is 0. You et al.,
// arXiv:1708.03888, equation 6.
PYOPS_HOST_DEVICE double local_rate(const LarsOptions& o, double squared_param, double squared_grad,
                                    double grad_factor) {
    if (!o.trust_ratio || squared_param == 0.0 || squared_grad == 0.0) return 1.0;
    const double param = sqrt(squared_param), grad = sqrt(squared_grad) * fabs(grad_factor);
    return o.trust_coefficient * param / (grad + o.sgd.weight_decay * param + o.eps);
}

// The rule of SGD with the rate inside the factor of the gradient and the weight decay: local (g +
// wd p).
template <typename Rule>
PYOPS_HOST_DEVICE Rule lars_rule(const LarsOptions& o, double grad_factor, double step,
                                 double local) {
    SgdOptions scaled = o.sgd;
    scaled.weight_decay *= local;
    return Rule(scaled, grad_factor * local, step);
}

}  // namespace pyops
