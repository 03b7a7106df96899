// What the kernels of the depthwise 3 x 3 convolution are told: images with their channels last,
// contiguous, of one dtype.
#pragma once
#include <cstdint>

namespace pyops {

constexpr int DEPTHWISE_SUMS = 10;  // rows of the gradient's sums: nine taps, and the bias

struct DepthwiseSpan {
    const void *x, *dy;  // [N, height, width, channels] and, in backward, as the output
    void* out;           // y, or dx; null: only the taps' gradient is wanted
    const void* taps;    // fp32 (float64 for float64) [9, channels]
    const void* bias;    // the same, [channels]; null: none
    int64_t height, width, out_height, out_width, channels;
    int dtype, stride;
    int activation;  // a code of math/layers/activation.h, or -1
    bool streams;    // the result would fill the caches: it may go past them
};

// Numbers of fp32 (float64) that a call of a kernel needs as scratch.
inline int64_t depthwise_scratch(const DepthwiseSpan& span) {
    return DEPTHWISE_SUMS * span.channels + 5 * span.width * span.channels;
}

}  // namespace pyops
