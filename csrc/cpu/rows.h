// Registers and sums for kernels that go over whole rows, in fp32 or in float64.
//
//   Wide<T>            a register of T at every instruction set: Vec of vector.h, or a vector that GCC makes of what there is
//   across<T>(n, f)    calls f(Lane<V>{}, i, slot) for every stretch of [0, n): V = Wide<T>, and T for the rest
//   Sums<T>            sums of such a sweep: four registers side by side, so that one addition need not wait for the last
#pragma once
#include "vector.h"

namespace pyops::PYOPS_ISA {
namespace {

using pyops::fused;  // for numbers, beside those for registers
using pyops::negative_fused;

typedef float FourFloats __attribute__((vector_size(16)));
typedef double FourDoubles __attribute__((vector_size(32)));

template <typename T, typename Register>
struct Lanes {
    static constexpr int64_t N = 4;
    Register x;
    Lanes() = default;
    Lanes(Register value) : x(value) {}
    explicit Lanes(T value) : x{value, value, value, value} {}
    friend Lanes operator+(Lanes a, Lanes b) { return a.x + b.x; }
    friend Lanes operator-(Lanes a, Lanes b) { return a.x - b.x; }
    friend Lanes operator*(Lanes a, Lanes b) { return a.x * b.x; }
    friend Lanes fused(Lanes a, Lanes b, Lanes c) { return a.x * b.x + c.x; }
    friend Lanes negative_fused(Lanes a, Lanes b, Lanes c) { return c.x - a.x * b.x; }
};
using Doubles = Lanes<double, FourDoubles>;
inline void load(Doubles& out, const double* p) { memcpy(&out.x, p, sizeof out.x); }
inline void store(double* p, Doubles a) { memcpy(p, &a.x, sizeof a.x); }
#if !defined(__AVX2__)
using Floats = Lanes<float, FourFloats>;
inline void load(Floats& out, const float* p) { memcpy(&out.x, p, sizeof out.x); }
inline void store(float* p, Floats a) { memcpy(p, &a.x, sizeof a.x); }
template <typename Half>
inline void load(Floats& out, const Half* p) {
    for (int k = 0; k < 4; ++k) {
        float x;
        load(x, p + k);
        out.x[k] = x;
    }
}
template <typename Half>
inline void store(Half* p, Floats a) {
    for (int k = 0; k < 4; ++k) store(p + k, static_cast<float>(a.x[k]));
}
#endif
inline void load(double& out, const double* p) { out = *p; }
inline void store(double* p, double a) { *p = a; }

template <typename T>
struct Register;
template <>
struct Register<double> {
    using type = Doubles;
};
template <>
struct Register<float> {
#if defined(__AVX2__)
    using type = Vec;
#else
    using type = Floats;
#endif
};
template <typename T>
using Wide = typename Register<T>::type;

// What a dtype in memory is computed in.
template <typename S>
struct Computed {
    using type = float;
};
template <>
struct Computed<double> {
    using type = double;
};

template <typename T, typename F>
inline __attribute__((always_inline)) void across(int64_t n, const F& f) {
    using V = Wide<T>;
    int64_t i = 0;
    for (; i + 4 * V::N <= n; i += 4 * V::N) {
        f(Lane<V>{}, i, 0);
        f(Lane<V>{}, i + V::N, 1);
        f(Lane<V>{}, i + 2 * V::N, 2);
        f(Lane<V>{}, i + 3 * V::N, 3);
    }
    for (; i + V::N <= n; i += V::N) f(Lane<V>{}, i, 0);
    for (; i < n; ++i) f(Lane<T>{}, i, 0);
}

template <typename T>
struct Sums {
    using V = Wide<T>;
    V wide[4] = {V(T(0)), V(T(0)), V(T(0)), V(T(0))};
    T rest = 0;

    inline __attribute__((always_inline)) void add(V x, int slot) { wide[slot] = wide[slot] + x; }
    inline __attribute__((always_inline)) void add(T x, int) { rest += x; }
    inline __attribute__((always_inline)) void add_product(V x, V y, int slot) { wide[slot] = fused(x, y, wide[slot]); }
    inline __attribute__((always_inline)) void add_product(T x, T y, int) { rest = fused(x, y, rest); }

    inline __attribute__((always_inline)) T total() const {
        T parts[V::N];
        store(parts, (wide[0] + wide[1]) + (wide[2] + wide[3]));
        for (int64_t half = V::N / 2; half > 0; half /= 2)
            for (int64_t k = 0; k < half; ++k) parts[k] += parts[k + half];
        return parts[0] + rest;
    }
};

}  // namespace
}  // namespace pyops::PYOPS_ISA
