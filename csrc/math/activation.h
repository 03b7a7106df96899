// Activations with their derivatives, for fp32 numbers, registers of them, and float64. Each functor sets act(z) and act'(z);
// what a loop does not use, the compiler drops. pyops/ops/activation.py has the formulas and their sources.
//
//   Phi(z)    |z| < 1:  1/2 + z P(z^2)                        minimax, absolute error 3e-10
//             else      Q = exp(-z^2 / 2) M(|z|), or 1 - Q    M the Mills ratio: w p(w), w = 1 / (|z| + 3), relative error 1.4e-8
//
// Phi is kept as h + t, h one of 0, 1/2, 1, so that z Phi is rounded once and a small Phi keeps its digits: 1 + erf loses them.
#pragma once
#include "exponential.h"

namespace pyops {

enum Activation : int { GELU = 0, GELU_TANH = 1, RELU = 2, SILU = 3, ACTIVATIONS = 4 };

// d = 1 + exp(-x), s = 1 / d and its complement 1 - s = exp(-x) s, which keeps its digits where s is close to 1.
template <typename T>
struct Sigmoid {
    T d, s, complement;
    PYOPS_HOST_DEVICE explicit Sigmoid(T x) {
        const T e = exponential(T(0.0f) - x);
        d = T(1.0f) + e;
        s = T(1.0f) / d;
        complement = at_most(e, T(1e38f)) * s;  // where e is infinite, s is 0 and so is what this goes into
    }
};

// Beyond this |z|, Phi is 0 or 1; a factor z may be bounded there, which keeps 0 times infinity out.
template <typename T>
PYOPS_HOST_DEVICE T normal_reach(T z) {
    return at_most(at_least(z, T(-15.0f)), T(15.0f));
}
PYOPS_HOST_DEVICE double normal_reach(double z) { return at_most(at_least(z, -40.0), 40.0); }

// Phi(z) = h + t and exp(-z^2 / 2), for z within its reach.
template <typename T>
PYOPS_HOST_DEVICE void normal_of(T z, T& h, T& t, T& e) {
    const T zero(0.0f), one(1.0f), a = magnitude(z), v = a * a;
    e = exponential(v * T(-0.5f));
    e = fused(e, fused(a, a, zero - v) * T(-0.5f), e);  // what v lost by rounding
    T p = fused(T(-7.66467825e-6f), v, T(1.13512653e-4f));
    p = fused(p, v, T(-1.18635306e-3f));
    p = fused(p, v, T(9.97333172e-3f));
    p = fused(p, v, T(-6.6490361e-2f));
    p = fused(p, v, T(3.9894228e-1f));
    const T w = one / (a + T(3.0f));
    T m = fused(T(286.153856f), w, T(-291.421025f));
    m = fused(m, w, T(70.1957877f));
    m = fused(m, w, T(3.02559837f));
    m = fused(m, w, T(7.94888675f));
    m = fused(m, w, T(3.15222479f));
    m = fused(m, w, T(1.19792495f));
    m = fused(m, w, T(3.98929489e-1f));
    const T q = e * (w * m);
    t = where_less(a, one, z * p, where_less(z, zero, q, zero - q));
    h = where_less(a, one, T(0.5f), where_less(z, zero, zero, one));
}
PYOPS_HOST_DEVICE void normal_of(double z, double& h, double& t, double& e) {
    const double q = 0.5 * erfc(fabs(z) * 0.70710678118654752440);
    e = exp(-0.5 * z * z);
    t = z < 0.0 ? q : -q;
    h = z < 0.0 ? 0.0 : 1.0;
}

struct Gelu {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        T h, t, e;
        const T near = normal_reach(z);
        normal_of(near, h, t, e);
        value = fused(near, t, h * z);
        slope = (h + t) + near * (e * T(0.39894228040143267794));
    }
};

struct GeluTanh {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        const T one(1.0f), k(1.59576912160573071176), near = normal_reach(z), v = near * near;
        const Sigmoid<T> of(near * k * fused(v, T(0.044715), one));
        value = z * of.s;
        slope = of.s + near * (of.s * of.complement) * k * fused(v, T(0.134145), one);
    }
};

struct Relu {
    template <typename T>
    PYOPS_HOST_DEVICE void operator()(T z, T& value, T& slope) const {
        value = larger(z, T(0.0f));
        slope = unless_zero(z, where_less(z, T(0.0f), T(0.0f), T(1.0f)));  // a nan lets the gradient pass, as in torch
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
template <typename F>
void with_activation(int activation, const F& f) {
    if (activation == GELU) f(Gelu{});
    else if (activation == GELU_TANH) f(GeluTanh{});
    else if (activation == RELU) f(Relu{});
    else f(Silu{});
}

}  // namespace pyops
