// Formulas of attention: the soft cap of scores, the step of a softmax that goes over its row piece
// by piece, and the counter of a weight that may be dropped.
#pragma once
#include "../exponential.h"

namespace pyops {

// c tanh(x / c) and its derivative. Near 0 the quotient of exponentials would lose digits: there a
// Taylor polynomial.
template <typename T>
struct SoftCap {
    T value, slope;
    PYOPS_HOST_DEVICE SoftCap(T x, T cap) {
        const T u = x / cap, a = magnitude(u), z = u * u;
        const T e = exponential(T(0.0f) - (a + a));
        const T far = sign_of(u) * ((T(1.0f) - e) / (T(1.0f) + e));
        T p = fused(z, T(-8.8632355e-3f), T(2.1869489e-2f));
        p = fused(p, z, T(-5.3968254e-2f));
        p = fused(p, z, T(1.3333333e-1f));
        p = fused(p, z, T(-3.3333333e-1f));
        const T near = fused(u * z, p, u);
        const T t = where_less(a, T(0.25f), near, far);
        value = cap * t;
        slope = negative_fused(t, t, T(1.0f));
    }
};
template <>
struct SoftCap<double> {
    double value, slope;
    PYOPS_HOST_DEVICE SoftCap(double x, double cap) {
        const double t = tanh(x / cap);
        value = cap * t;
        slope = 1.0 - t * t;
    }
};

// What to subtract from scores so that no exponential overflows; nothing where all are -inf.
template <typename T>
PYOPS_HOST_DEVICE T softmax_shift(T maximum) {
    return maximum == T(-INFINITY) ? T(0) : maximum;
}

// exp x for x <= 0, and 0 below -87, where it would be subnormal: beside a largest weight of 1 that
// is nothing, and some processors take a hundred times as long for a result of that kind, one for
// each score of -inf.
template <typename T>
PYOPS_HOST_DEVICE T softmax_exponential(T x) {
    const T least = T(-87.0f);
    return where_less(x, least, T(0.0f), exponential(at_least(x, least)));
}
PYOPS_HOST_DEVICE double softmax_exponential(double x) { return exp(x); }

// Where the counters of the weights of a batch: of row b, head h, query place t, key place s.
struct WeightCounters {
    uint64_t first;  // of the first weight, everything before this part of the whole included
    int64_t row_stride, num_queries, num_keys;

    PYOPS_HOST_DEVICE uint64_t at(int64_t b, int64_t h, int64_t t, int64_t s) const {
        return first + static_cast<uint64_t>(b * row_stride + (h * num_queries + t) * num_keys + s);
    }
};

}  // namespace pyops
