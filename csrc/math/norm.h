// Layer norm and root-mean-square norm of one element, and their gradients. V: a number or a register of them, T: a number.
#pragma once
#include "arithmetic.h"

namespace pyops {

// What a row's elements are normalised with. The mean is kept in two parts, a rounded sum and what the second pass finds it lacks:
// x - centre is exact for numbers near the mean, so a row of 10000 +- 1 loses no more digits than one of 0 +- 1.
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
    return ((x - V(row.centre)) - V(row.shift)) * V(row.rstd);
}

// The gradient of a norm's input from g = dy scale, the normalised h, and the row's means of g and of g h.
template <bool RMS, typename V, typename T>
PYOPS_HOST_DEVICE V norm_gradient(V g, V h, T mean_g, T mean_gh, T rstd) {
    if (RMS) return negative_fused(h, V(mean_gh), g) * V(rstd);
    return negative_fused(h, V(mean_gh), g - V(mean_g)) * V(rstd);
}

}  // namespace pyops
