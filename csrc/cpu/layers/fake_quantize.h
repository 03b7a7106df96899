// What the kernels of fake_quantize are told: [outer, channels, inner], contiguous, a scale for
// each channel.
//
//   inner > 1    a run: the `inner` neighbors that share a scale; runs are cut into pieces
//   inner = 1    neighbors have scales of their own: rows of channels
#pragma once
#include "../rows/row_tile.h"

namespace pyops {

constexpr int64_t FAKE_QUANTIZE_PIECE = 16384;  // numbers whose sum is one of a channel's summands

struct FakeQuantizeSpan {
    const void *dy, *x;
    void* out;  // y, or dx; null: only the scales' gradient is wanted
    const void *scale,
        *zero;  // fp32 (float64 for float64) [channels]; zero: null where there is none
    int64_t channels, inner;
    double low, high;  // the first and the last code
    int dtype;

    int64_t pieces() const { return (inner + FAKE_QUANTIZE_PIECE - 1) / FAKE_QUANTIZE_PIECE; }
};

}  // namespace pyops
