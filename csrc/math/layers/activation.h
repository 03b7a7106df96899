// Activations with their derivatives, for fp32 numbers, registers of them, and float64. Each
// functor sets act(z) and act'(z);
// what a loop does not use, the compiler drops. pyops/ops/layers/activation.py has the formulas and
// their sources.
//
//   Phi(z) |z| < 1: 1/2 + z p(z^2)                      minimax, absolute error 3e-10
//          else     Q = exp(-z^2 / 2) M(|z|), or 1 - Q  M the Mills ratio: w p(w),
//                                                       w = 1 / (|z| + 3), relative error 1.4e-8
//
// z Phi(z) is max(z, 0) - |z| Q: rounded once, and a small Phi keeps its digits, which 1 + erf
// would lose.
#pragma once
#include "../exponential.h"

namespace pyops {

enum Activation : int { GELU = 0, GELU_TANH = 1, RELU = 2, SILU = 3, ACTIVATIONS = 4 };

// d = 1 + exp(-x), s = 1 / d and its complement 1 - s = exp(-x) s, which keeps its digits where s
// is close to 1.
template <typename T>
struct Sigmoid {
    T d, s, complement;
    PYOPS_HOST_DEVICE explicit Sigmoid(T x) {
        const T e = exponential(T(0.0f) - x);
        d = T(1.0f) + e;
        s = T(1.0f) / d;
        // Where e is infinite, s is 0 and so is what this goes into
        complement = at_most(e, T(1e38f)) * s;
    }
};

// exp(-v / 2) for 0 <= v <= 210, without exponential's bounds; relative error 3e-9, or 5e-6 where
// that is enough.
template <bool FINE, typename T>
PYOPS_HOST_DEVICE T bell(T v) {
    // 1.5 2^23: the addition rounds to a whole number
    const T shift(12582912.0f), x = v * T(-0.5f);
    const T n = fused(v, T(-0.72134752f), shift) - shift;
    const T r = negative_fused(n, T(-2.12194440e-4f), negative_fused(n, T(0.693359375f), x));
    T p;
    if (FINE) {
        p = fused(T(1.38146133e-3f), r, T(8.36870996e-3f));
        p = fused(p, r, T(4.16683874e-2f));
        p = fused(p, r, T(1.66665207e-1f));
        p = fused(p, r, T(4.99999935e-1f));
    } else {
        p = fused(T(4.12777446e-2f), r, T(1.67535143e-1f));
        p = fused(p, r, T(5.00051161e-1f));
    }
    return times_power_of_two(fused(p, r * r, r) + T(1.0f), n);
}

// Phi(-a) = exp(-a^2 / 2) w p(w), w = 1 / (a + 3), the Mills ratio times the bell; `e` is the bell.
template <bool FINE, typename T>
PYOPS_HOST_DEVICE T normal_tail(T a, T e) {
    const T w = T(1.0f) / (a + T(3.0f));
    T m;
    if (FINE) {
        m = fused(T(286.153856f), w, T(-291.421025f));
        m = fused(m, w, T(70.1957877f));
        m = fused(m, w, T(3.02559837f));
        m = fused(m, w, T(7.94888675f));
        m = fused(m, w, T(3.15222479f));
        m = fused(m, w, T(1.19792495f));
        m = fused(m, w, T(3.98929489e-1f));
    } else {
        m = fused(T(-38.4468233f), w, T(19.3088528f));
        m = fused(m, w, T(7.81941892f));
        m = fused(m, w, T(2.92753382f));
        m = fused(m, w, T(1.21983586f));
        m = fused(m, w, T(3.98308253e-1f));
    }
    return e * (w * m);
}

// Not FINE: for a value that will be stored in 16 bits, relative error 2e-5.
template <bool FINE>
struct Gelu {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        const T zero(0.0f), one(1.0f);
        // Beyond 14.3 the tail is 0 in fp32
        const T a = at_most(magnitude(z), T(14.3f)), v = a * a;
        const T e = bell<FINE>(v), density = e * T(0.39894228f), q = normal_tail<FINE>(a, e);
        // |z|, of a large positive z its bound: -inf Phi(-inf) is nan, as everywhere, and an
        // overflow does not pass for a 0.
        const T factor = at_least(zero - z, at_most(z, T(14.3f)));
        value = negative_fused(factor, q, larger(z, zero));
        const T rest = negative_fused(a, density, q);  // of the slope, at -a
        slope = where_less(z, zero, rest, one - rest);
        if (!FINE) return;
        T p = fused(T(-7.66467825e-6f), v, T(1.13512653e-4f));  // Phi(z) = 1/2 + z p(z^2)
        p = fused(p, v, T(-1.18635306e-3f));
        p = fused(p, v, T(9.97333172e-3f));
        p = fused(p, v, T(-6.6490361e-2f));
        p = fused(p, v, T(3.9894228e-1f));
        value = where_less(a, one, fused(v, p, z * T(0.5f)), value);
        slope = where_less(a, one, fused(z, p + density, T(0.5f)), slope);
    }
    PYOPS_HOST_DEVICE void operator()(double z, double& value, double& slope) const {
        const double cumulative = 0.5 * erfc(z * -0.70710678118654752440);
        value = z * cumulative;
        slope = fabs(z) < 40.0 ? cumulative + z * exp(-0.5 * z * z) * 0.39894228040143267794
                               : cumulative;
    }
};

struct GeluTanh {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        // Beyond, s is 0 or 1; z^3 must not overflow
        const T one(1.0f), k(1.59576912160573071176), reach(40.0f);
        const T near = at_most(at_least(z, T(0.0f) - reach), reach), v = near * near;
        const Sigmoid<T> of(near * k * fused(v, T(0.044715), one));
        value = z * of.s;
        slope = of.s + near * (of.s * of.complement) * k * fused(v, T(0.134145), one);
    }
};

struct Relu {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        value = larger(z, T(0.0f));
        // A nan lets the gradient pass, as in torch
        slope = unless_zero(z, where_less(z, T(0.0f), T(0.0f), T(1.0f)));
    }
};

struct Silu {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        const Sigmoid<T> of(z);
        value = z / of.d;
        slope = of.s * fused(z, of.complement, T(1.0f));
    }
};

// Calls f with the functor of an activation's code.
template <bool FINE, typename F>
void with_activation(int activation, const F& f) {
    if (activation == GELU)
        f(Gelu<FINE>{});
    else if (activation == GELU_TANH)
        f(GeluTanh{});
    else if (activation == RELU)
        f(Relu{});
    else
        f(Silu{});
}

}  // namespace pyops
