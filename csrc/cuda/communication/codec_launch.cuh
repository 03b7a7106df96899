// From the checked arguments of an op (csrc/host/communication/codec_ops.h) to those of a kernel.
#pragma once

#include "../../host/communication/codec_ops.h"
#include "codec.cuh"
#include "../launch.cuh"

namespace pyops::cuda {

inline Codec codec_of(const CodecSpan& span, const OptionalTensor& flag) {
    return {span.n,
            span.block,
            span.error,
            span.payload,
            data_of(flag),
            span.rule,
            span.stochastic_rounding,
            span.seed,
            span.offset,
            0};
}

inline Payloads payloads_of(const CodecSpan& span, const char* op) {
    require(span.num_rows <= MAX_PAYLOADS, "pyops::", op, ": takes at most ", MAX_PAYLOADS,
            " payloads on CUDA, got ", span.num_rows);
    Payloads out{};
    for (int r = 0; r < span.num_rows; ++r) out.row[r] = span.rows[r];
    out.count = span.num_rows;
    out.head = span.row_scales ? 0 : 4 * span.blocks();
    out.row_scales = span.row_scales;
    out.scale = span.scale;
    return out;
}

// Calls body(source) with the numbers of x in their dtype.
template <typename Body>
void with_numbers(const CodecSpan& span, const Body& body) {
    if (span.dtype == FP32) return body(Numbers<FP32>{span.x});
    if (span.dtype == BF16) return body(Numbers<BF16>{span.x});
    body(Numbers<FP16>{span.x});
}

// A grid of warps for so many blocks.
template <auto kernel>
unsigned grid_of(int64_t blocks, const Launch& on) {
    constexpr int WARPS = CODEC_THREADS / WARP;
    return grid_for<kernel>((blocks + WARPS - 1) / WARPS, on.device, CODEC_THREADS);
}

template <int OUT, typename Source>
void launch_decode(const CodecSpan& span, const Launch& on, const Source& source, const char* op) {
    constexpr auto kernel = decode_kernel<OUT, Source>;
    kernel<<<grid_of<kernel>(span.blocks(), on), CODEC_THREADS, 0, on.stream>>>(
        span.out, source, span.n, span.block, span.accumulate);
    check_launch(op);
}

template <typename Source>
void decode(const CodecSpan& span, const Launch& on, const Source& source, const char* op) {
    if (span.dtype_out == FP32) return launch_decode<FP32>(span, on, source, op);
    if (span.dtype_out == BF16) return launch_decode<BF16>(span, on, source, op);
    launch_decode<FP16>(span, on, source, op);
}

}  // namespace pyops::cuda
