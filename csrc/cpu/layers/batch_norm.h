// What the kernels of batch norm are told: a contiguous matrix of pixels and channels, and numbers
// for each channel.
#pragma once
#include "../rows/row_tile.h"

namespace pyops {

struct ChannelRows {
    const void *x, *dy;  // of `dtype`; dy: null in forward
    void* out;
    // Fp32 (float64 for float64) [channels]: csrc/math/layers/batch_norm.h; slope: gradient alone
    const void *centre, *scale, *slope, *shift;
    int64_t channels;
    int dtype;
    int activation;  // of forward: a code of math/layers/activation.h, or -1
};

}  // namespace pyops
