// Batch norm of one channel: moments that merge, normalization, and the gradient of the input.
#pragma once
#include "../arithmetic.h"

namespace pyops {

// Mean and sum of squared distances from it, of two sets of numbers made one: Chan, Golub and
// LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979. The
// weights are the same for all channels.
struct MomentsMerge {
    double share, spread;  // the other's part of all; what a distance of the means adds

    PYOPS_HOST_DEVICE MomentsMerge(double count, double other)
        : share(other / (count + other)), spread(count * share) {}
    PYOPS_HOST_DEVICE void operator()(double& mean, double& squares, double other_mean,
                                      double other_squares) const {
        const double distance = other_mean - mean;
        mean += distance * share;
        squares += other_squares + distance * distance * spread;
    }
};

// (x - centre) scale + shift
template <typename V>
PYOPS_HOST_DEVICE V channel_affine(V x, V centre, V scale, V shift) {
    return fused(x - centre, scale, shift);
}

// dy scale + (x - centre) slope + shift
template <typename V>
PYOPS_HOST_DEVICE V channel_gradient(V dy, V x, V centre, V scale, V slope, V shift) {
    return fused(dy, scale, fused(x - centre, slope, shift));
}

}  // namespace pyops
