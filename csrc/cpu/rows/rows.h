// Registers and sums for kernels that go over whole rows, in fp32 or in float64.
//
//   Wide<T>          a register of T at every instruction set: Vec of vector.h, or a vector that
//                    GCC makes of what there is
//   across<T>(n, f)  calls f(Lane<V>{}, i, slot) for every stretch of [0, n): V = Wide<T>, and T
//                    for the rest
//   along<T>(n, f)   the same without slots: f(Lane<V>{}, i)
//   Sums<T, SLOTS>   a sum over such a sweep: up to four registers side by side, so that one
//                    addition need not wait for the last
#pragma once
#include "storage.h"

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

// The same where nothing is summed up: no slots, so that f is compiled twice and not six times.
template <typename T, typename F>
inline __attribute__((always_inline)) void along(int64_t n, const F& f) {
    using V = Wide<T>;
    int64_t i = 0;
    for (; i + V::N <= n; i += V::N) f(Lane<V>{}, i);
    for (; i < n; ++i) f(Lane<T>{}, i);
}

#if defined(__AVX2__)
inline float sum_of(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
#if defined(__AVX512F__)
inline float sum_of(Vec a) {
    return sum_of(_mm256_add_ps(_mm512_castps512_ps256(a.x), _mm512_extractf32x8_ps(a.x, 1)));
}
#else
inline float sum_of(Vec a) { return sum_of(a.x); }
#endif
#endif
template <typename T, typename Register>
inline T sum_of(Lanes<T, Register> a) {
    return (a.x[0] + a.x[2]) + (a.x[1] + a.x[3]);
}

template <typename T, int SLOTS = 4>
struct Sums {
    using V = Wide<T>;
    V wide[SLOTS];
    T rest = 0;

    inline __attribute__((always_inline)) Sums() {
        for (V& sum : wide) sum = V(T(0));
    }
    inline __attribute__((always_inline)) void add(V x, int slot) {
        wide[slot % SLOTS] = wide[slot % SLOTS] + x;
    }
    inline __attribute__((always_inline)) void add(T x, int) { rest += x; }
    inline __attribute__((always_inline)) void add_product(V x, V y, int slot) {
        wide[slot % SLOTS] = fused(x, y, wide[slot % SLOTS]);
    }
    inline __attribute__((always_inline)) void add_product(T x, T y, int) {
        rest = fused(x, y, rest);
    }

    inline __attribute__((always_inline)) T total() const {
        V sum = wide[0];
        for (int k = 1; k < SLOTS; ++k) sum = sum + wide[k];
        return sum_of(sum) + rest;
    }
};

}  // namespace
}  // namespace pyops::PYOPS_ISA
