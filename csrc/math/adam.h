// One step of Adam on one element: pyops/ops/optim.py states the formula and its sources. T is the type computed in.
//
// The hyper-parameters come from the host as float64 and are rounded to T once, after everything that depends on the step
// has been worked out in float64: the inner loop has no pow, no double and one division.
#pragma once
#include "host_device.h"

namespace pyops {

// What the caller gives, as float64.
struct AdamOptions {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled, maximize;
};

PYOPS_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
PYOPS_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// The larger; a nan on either side stays, as in torch.maximum.
template <typename T>
PYOPS_HOST_DEVICE T larger(T a, T b) {
    return (a > b || a != a) ? a : b;
}

// a b + c and c - a b, rounded once where the hardware can. Written out, never left to the compiler, which would choose
// differently for a loop and for its last elements: a shard would then differ from the whole in the last bit.
#if defined(__CUDA_ARCH__) || defined(__FMA__) || defined(__ARM_FEATURE_FMA)
PYOPS_HOST_DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }
PYOPS_HOST_DEVICE double fused(double a, double b, double c) { return fma(a, b, c); }
#else
PYOPS_HOST_DEVICE float fused(float a, float b, float c) { return a * b + c; }
PYOPS_HOST_DEVICE double fused(double a, double b, double c) { return a * b + c; }
#endif
PYOPS_HOST_DEVICE float negative_fused(float a, float b, float c) { return fused(-a, b, c); }
PYOPS_HOST_DEVICE double negative_fused(double a, double b, double c) { return fused(-a, b, c); }

// T is float, double, or a register of them that has + - * /, square_root, larger, fused and negative_fused.
template <typename T>
struct Adam {
    T factor;           // of the gradient: unscale, clip, and the sign of maximize
    T l2;               // weight decay added to the gradient; 0 when decoupled
    T decay;            // 1 - lr * weight decay; 1 when not decoupled
    T one_minus_beta1, beta2, one_minus_beta2;
    T step_size;        // lr / (1 - beta1^step)
    T rsqrt_bc2;        // 1 / sqrt(1 - beta2^step)
    T eps;

    Adam() = default;

    // beta1_power = beta1^step, beta2_power = beta2^step; grad_factor is 1 when nothing is to be scaled.
    PYOPS_HOST_DEVICE Adam(const AdamOptions& o, double grad_factor, double beta1_power, double beta2_power)
        : factor(static_cast<T>(o.maximize ? -grad_factor : grad_factor)),
          l2(static_cast<T>(o.decoupled ? 0.0 : o.weight_decay)),
          decay(static_cast<T>(o.decoupled ? 1.0 - o.lr * o.weight_decay : 1.0)),
          one_minus_beta1(static_cast<T>(1.0 - o.beta1)),
          beta2(static_cast<T>(o.beta2)),
          one_minus_beta2(static_cast<T>(1.0 - o.beta2)),
          step_size(static_cast<T>(o.lr / (1.0 - beta1_power))),
          rsqrt_bc2(static_cast<T>(1.0 / sqrt(1.0 - beta2_power))),
          eps(static_cast<T>(o.eps)) {}

    // The same in another type, say each number spread over a register.
    template <typename U>
    explicit PYOPS_HOST_DEVICE Adam(const Adam<U>& a)
        : factor(a.factor), l2(a.l2), decay(a.decay), one_minus_beta1(a.one_minus_beta1), beta2(a.beta2),
          one_minus_beta2(a.one_minus_beta2), step_size(a.step_size), rsqrt_bc2(a.rsqrt_bc2), eps(a.eps) {}

    // L2: whether l2 is used at all (0 * inf would be nan). AMSGRAD: whether vmax is.
    template <bool L2, bool AMSGRAD>
    PYOPS_HOST_DEVICE void operator()(T& p, T g, T& m, T& v, T& vmax) const {
        g = g * factor;
        if (L2) g = fused(l2, p, g);
        m = fused(one_minus_beta1, g - m, m);
        v = fused(one_minus_beta2 * g, g, beta2 * v);
        T largest = v;
        if (AMSGRAD) {
            vmax = larger(v, vmax);
            largest = vmax;
        }
        const T denominator = fused(square_root(largest), rsqrt_bc2, eps);
        p = negative_fused(step_size, m / denominator, p * decay);
    }
};

}  // namespace pyops
