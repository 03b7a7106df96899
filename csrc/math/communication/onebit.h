// One-bit compression with error feedback: Seide et al., "1-bit stochastic gradient descent",
// Interspeech 2014, section 3. pyops/ops/communication/onebit.py states the formula. A block's sum
// is float64 and in an order that all kernels share:
//
//   element i of a block -> sum i % ONEBIT_LANES, in ascending order
//                        -> k + 64 added to k, then k + 32, 16, 8, 4, 2, 1
#pragma once
#include "../host_device.h"

namespace pyops {

constexpr int64_t ONEBIT_LANES = 128;  // a warp of 32 with 4 numbers each

enum OneBitRule : int { L1 = 0, RMS = 1 };

// What one number adds to its block's sum.
PYOPS_HOST_DEVICE double onebit_term(float u, int rule) {
    const double wide = static_cast<double>(u);
    return rule == RMS ? wide * wide : fabs(wide);
}

// The scale of a block with this sum over `count` numbers; nan when one of them was not finite.
PYOPS_HOST_DEVICE float onebit_scale(double sum, int64_t count, int rule) {
    const double mean = sum / static_cast<double>(count);
    const float scale = static_cast<float>(rule == RMS ? sqrt(mean) : mean);
    return scale <= 3.402823466e+38f ? scale : float_of(0x7FC00000u);
}

// Bit 1 stands for +scale: zero counts as positive, and so does -0.
PYOPS_HOST_DEVICE float onebit_value(float scale, bool positive) {
    return positive ? scale : -scale;
}

PYOPS_HOST_DEVICE float onebit_error(float u, float scale) {
    return u - onebit_value(scale, u >= 0.0f);
}

}  // namespace pyops
