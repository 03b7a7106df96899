// Adafactor: the second moment of a matrix from its row and column means.
// pyops/ops/optimizers/adafactor.py states the formula.
#pragma once
#include "../arithmetic.h"

namespace pyops {

struct AdafactorOptions {
    double lr, beta2_decay, eps1, eps2, d, weight_decay;  // eps1 < 0: that of the dtype stepped
    bool maximize;
};

// mean + (var - mean) beta2, with weight = 1 - beta2 = step^beta2_decay.
PYOPS_HOST_DEVICE float moved_towards(float variance, double mean, double weight) {
    return static_cast<float>((1.0 - weight) * static_cast<double>(variance) + weight * mean);
}

PYOPS_HOST_DEVICE double weight_of(const AdafactorOptions& o, double step) {
    return pow(step, o.beta2_decay);
}

// What the update is multiplied by: the relative step size, over the update's root mean square
// where that exceeds d.
PYOPS_HOST_DEVICE double relative_step(const AdafactorOptions& o, double step, double squared_param,
                                       double squared_update, double n) {
    const double rho = o.lr < 1.0 / sqrt(step) ? o.lr : 1.0 / sqrt(step),
                 rms = sqrt(squared_param / n);
    const double excess = sqrt(squared_update / n) / o.d;
    return (rms < o.eps2 ? o.eps2 : rms) * rho / (excess <= 1.0 ? 1.0 : excess);
}

// sqrt(variance) of an element is row_root * column_root; of a vector's, column_root, and row_root
// is 1.
template <typename T>
struct Factored {
    T factor;  // of the gradient: unscale, clip, and the sign of maximize
    T eps;     // the least root
    T decay;   // 1 - lr * weight decay
    T scale;   // relative_step

    Factored() = default;
    template <typename U>
    explicit PYOPS_HOST_DEVICE Factored(const Factored<U>& f)
        : factor(f.factor), eps(f.eps), decay(f.decay), scale(f.scale) {}

    PYOPS_HOST_DEVICE T update(T g, T row_root, T column_root) const {
        return g * factor / larger(row_root * column_root, eps);
    }
    PYOPS_HOST_DEVICE T moved(T p, T update) const {
        return negative_fused(scale, update, p * decay);
    }
};

}  // namespace pyops
