// How the CPU ops of the codecs run their kernels: blocks on torch's threads, and the flag after
// the last of them.
#pragma once
#include <atomic>

#include "../../host/communication/codec_ops.h"
#include "../kernels.h"
#include "../calls/loop.h"

namespace pyops {

constexpr int64_t STREAMED_NUMEL = 8 << 20;  // elements of an output that the caches can't hold

// Calls f(first, last) on ranges of the span's blocks.
template <typename F>
void for_blocks(const CodecSpan& span, F f) {
    const int64_t blocks = span.blocks();
    if (blocks == 0) return;
    if (span.n <= SERIAL || blocks == 1)
        f(int64_t{0}, blocks);
    else
        torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, SERIAL / 2 / span.block), f);
}

using EncodeKernel = bool (*)(const CodecSpan&, int64_t, int64_t);
using SumKernel = void (*)(const CodecSpan&, int64_t, int64_t);

inline void encode_blocks(const CodecSpan& span, EncodeKernel encode, const OptionalTensor& flag) {
    std::atomic<bool> bad{false};
    for_blocks(span, [&](int64_t first, int64_t last) {
        if (encode(span, first, last)) bad.store(true, std::memory_order_relaxed);
    });
    if (bad && flag) *static_cast<float*>(flag->data_ptr()) = 1.0f;
}

inline void sum_blocks(CodecSpan span, SumKernel sum) {
    span.streams = span.n >= STREAMED_NUMEL;
    for_blocks(span, [&](int64_t first, int64_t last) { sum(span, first, last); });
}

}  // namespace pyops
