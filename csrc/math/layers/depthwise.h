// Which numbers meet in a 3 x 3 convolution with a padding of one, along one dimension; the same
// for rows and for columns.
//
//   stride 1   output o = sum over taps t of tap[t] input[o + t - 1]
//   stride 2   output o = sum over taps t of tap[t] input[2 o + t - 1]
#pragma once
#include "../host_device.h"

namespace pyops {

constexpr int TAPS = 3;  // along one dimension

// Outputs of n inputs, n >= 1.
PYOPS_HOST_DEVICE int64_t depthwise_outputs(int64_t n, int64_t stride) {
    return (n - 1) / stride + 1;
}

template <int STRIDE>
struct TapPlace {
    PYOPS_HOST_DEVICE static constexpr int64_t input(int64_t output, int tap) {
        return output * STRIDE + tap - 1;
    }
    // Whether a tap brings an input to any output, and to which; input + 1 >= tap.
    PYOPS_HOST_DEVICE static constexpr bool meets(int64_t input, int tap) {
        return (input + 1 - tap) % STRIDE == 0;
    }
    PYOPS_HOST_DEVICE static constexpr int64_t output(int64_t input, int tap) {
        return (input + 1 - tap) / STRIDE;
    }
};

}  // namespace pyops
