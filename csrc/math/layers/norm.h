// Layer norm and root-mean-square norm of one element, and their gradients. V: a number or a
// register of them, T: a number.
#pragma once
#include "../arithmetic.h"

namespace pyops {

// What a row's elements are normalised with. The mean is kept in two parts, a rounded sum and what
// the second pass finds it lacks:
// x - centre is exact for numbers near the mean, so a row of 10000 +- 1 loses no more digits than
// one of 0 +- 1.
template <typename T>
struct RowStatistics {
    T centre, shift, rstd;
    PYOPS_HOST_DEVICE T mean() const { return centre + shift; }

    // From sums over the n elements of a row: of d = x - centre and of d^2.
    PYOPS_HOST_DEVICE static RowStatistics of_layer(T centre, T sum, T sum_of_squares, T n, T eps) {
        const T shift = sum / n;
        const T variance = larger(sum_of_squares / n - shift * shift, T(0));
        return {centre, shift, T(1) / square_root(variance + eps)};
    }
    PYOPS_HOST_DEVICE static RowStatistics of_rms(T sum_of_squares, T n, T eps) {
        return {T(0), T(0), T(1) / square_root(sum_of_squares / n + eps)};
    }
};

// (x - mean) rstd
template <bool RMS, typename V, typename T>
PYOPS_HOST_DEVICE V normalised(V x, const RowStatistics<T>& row) {
    if (RMS) return x * V(row.rstd);
    return fused(x - V(row.centre), V(row.rstd), V(-row.shift * row.rstd));
}

// The gradient of a norm's input: rstd (g - mean(g) - h mean(g h)) with g = dy scale and h = d
// rstd, d = x - mean, which is rstd g - d along - across, with two numbers for each row.
template <typename T>
struct RowGradient {
    T mean, rstd, along, across;

    // From the sums of g and of g d over the row's n elements. Products in this order stay near the
    // size of g.
    PYOPS_HOST_DEVICE void finish(T sum_g, T sum_gd, T n) {
        along = sum_gd / n * rstd * rstd * rstd;
        across = sum_g / n * rstd;
    }
    template <bool RMS, typename V>
    PYOPS_HOST_DEVICE V centred(V x) const {
        return RMS ? x : x - V(mean);
    }
    template <bool RMS, typename V>
    PYOPS_HOST_DEVICE V gradient(V g, V d) const {
        const V term = RMS ? g * V(rstd) : fused(g, V(rstd), V(-across));
        return negative_fused(d, V(along), term);
    }
    template <bool RMS, typename V>
    PYOPS_HOST_DEVICE V gradient(V g, V d, V more) const {
        return negative_fused(d, V(along), fused(g, V(rstd), RMS ? more : more - V(across)));
    }
};

}  // namespace pyops
