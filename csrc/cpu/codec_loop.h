// How the CPU ops of the codecs run their kernels: blocks on torch's threads, and the flag after the last of them.
#pragma once
#include <atomic>

#include "codec_ops.h"
#include "kernels.h"
#include "loop.h"

namespace pyops {

constexpr int64_t STREAMED_NUMEL = 8 << 20;  // elements of an output that the caches can't hold

inline float* data_of(const std::optional<Tensor>& t) { return t && t->numel() ? static_cast<float*>(t->data_ptr()) : nullptr; }

inline std::vector<const uint8_t*> addresses(const Tensors& rows) {
    std::vector<const uint8_t*> out;
    for (const Tensor& row : rows) out.push_back(static_cast<const uint8_t*>(row.data_ptr()));
    return out;
}

// Calls f(first, last) on ranges of the span's blocks.
template <typename F>
void for_blocks(const CodecSpan& span, F f) {
    const int64_t blocks = span.blocks();
    if (blocks == 0) return;
    if (span.n <= SERIAL || blocks == 1) f(int64_t{0}, blocks);
    else torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, SERIAL / 2 / span.block), f);
}

template <typename Encode>
void encode_all(const CodecSpan& span, Encode encode, const std::optional<Tensor>& flag) {
    std::atomic<bool> bad{false};
    for_blocks(span, [&](int64_t first, int64_t last) {
        if (encode(span, first, last)) bad.store(true, std::memory_order_relaxed);
    });
    if (bad && flag) *static_cast<float*>(flag->data_ptr()) = 1.0f;
}

}  // namespace pyops
