// Numbers as few bits would give them back, with the derivatives that training takes for those of
// the rounding: straight through inside of the range (Bengio et al., arXiv:1308.3432), and that of
// the scale (Esser et al., arXiv:1902.08153, equation 3). For numbers and registers.
// pyops/ops/layers/fake_quantize.py states the formulas.
#pragma once
#include "../exponential.h"

namespace pyops {

// 1.5 2^23 and 1.5 2^52: the last place of the sum is 1, so the addition rounds to nearest even.
template <typename T>
PYOPS_HOST_DEVICE T nearest_whole(T t) {
    const T shift(12582912.0f);
    return (t + shift) - shift;
}
PYOPS_HOST_DEVICE double nearest_whole(double t) {
    return (t + 6755399441055744.0) - 6755399441055744.0;
}

// A number in units of its scale. `low` and `high`: the ends of the range, less the zero point.
template <typename T>
struct Steps {
    T ratio, whole, low, high;

    // A scale that is not above 0 has nothing to divide by: all is 0, or nan where the scale is.
    PYOPS_HOST_DEVICE Steps(T x, T scale, T low_end, T high_end) : low(low_end), high(high_end) {
        const T zero(0.0f), one(1.0f);
        ratio = where_less(zero, scale, x / scale, zero);
        whole = nearest_whole(at_most(at_least(ratio, low - one), high + one));
    }
    PYOPS_HOST_DEVICE T value(T scale) const { return at_most(at_least(whole, low), high) * scale; }
    // `inside` where the rounded number is within the range, else what stands beside it.
    PYOPS_HOST_DEVICE T within(T inside, T below, T above) const {
        return where_less(whole, low, below, where_less(high, whole, above, inside));
    }
    PYOPS_HOST_DEVICE T of_input(T dy) const { return within(dy, T(0.0f), T(0.0f)); }
    PYOPS_HOST_DEVICE T of_scale(T dy) const { return dy * within(whole - ratio, low, high); }
};

}  // namespace pyops
