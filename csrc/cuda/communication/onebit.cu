// One-bit compression on the GPU: no host synchronisation, no memory but the workspace of the norm.
#include "../../host/box.h"
#include "codec_launch.cuh"
#include "onebit_kernel.cuh"

namespace pyops::cuda {
namespace {

using torch::headeronly::ScalarType;
using OneBitRows = RowSum<SignBits>;

// What a warp takes at a time where blocks have no scales
constexpr int64_t SCALED_BLOCK = 4 * LINE;

template <int LINES, typename Source>
void launch_encode(const Codec& codec, int64_t blocks, const Launch& on, const Source& source) {
    constexpr auto kernel = onebit_encode_kernel<LINES, Source>;
    kernel<<<grid_of<kernel>(blocks, on), CODEC_THREADS, 0, on.stream>>>(codec, source);
    check_launch("one-bit encode");
}

// Full blocks of rows are held, where their words are in line; the others are read twice, from the
// caches.
void encode_rows(Codec codec, int64_t blocks, const Launch& on, const Payloads& rows) {
    codec.first = held_blocks(codec, rows);
    if (codec.first > 0) {
        onebit_held_kernel<<<grid_of<onebit_held_kernel>(codec.first, on), CODEC_THREADS, 0,
                             on.stream>>>(codec, rows, codec.first);
        check_launch("one-bit encode");
    }
    if (codec.first < blocks) launch_encode<0>(codec, blocks - codec.first, on, OneBitRows{rows});
}

void onebit_encode_(const Tensor payload, const Tensor x, const OptionalTensor error,
                    const OptionalTensor flag, int64_t block, const std::string rule) {
    const CodecCheck check("onebit_encode_", true, ONEBIT);
    const CodecSpan span = encode_span(check, payload, x, error, flag, {block, rule});
    if (span.n == 0) return;
    const Launch on(x);
    const Codec codec = codec_of(span, flag);
    with_numbers(span, [&](const auto& source) {
        if (span.block <= HELD_LINES * LINE)
            launch_encode<HELD_LINES>(codec, span.blocks(), on, source);
        else
            launch_encode<0>(codec, span.blocks(), on, source);
    });
}

void onebit_reencode_(const Tensor payload, const Tensors payloads, const OptionalTensor error,
                      const OptionalTensor flag, int64_t n, int64_t block, double scale,
                      const std::string rule) {
    const CodecCheck check("onebit_reencode_", true, ONEBIT);
    const auto rows = addresses(payloads);
    const CodecSpan span =
        reencode_span(check, payload, payloads, rows, error, flag, n, scale, {block, rule});
    const Payloads sources = payloads_of(span, check.op);
    if (n == 0) return;
    encode_rows(codec_of(span, flag), span.blocks(), Launch(payload), sources);
}

Tensor onebit_norm(const Tensor x, const OptionalTensor error) {
    const CodecCheck check("onebit_norm", true, ONEBIT);
    const CodecSpan span = scaled_span(check, nullptr, x, error, SCALED_BLOCK);
    const Launch on(x);
    const auto device = torch::stable::Device(torch::headeronly::DeviceType::CUDA, on.device);
    const std::vector<int64_t> three = {3}, bytes = {static_cast<int64_t>(sizeof(OneBitWorkspace))};
    Tensor out = torch::stable::empty(three, ScalarType::Double, std::nullopt, device);
    Tensor memory = torch::stable::empty(bytes, ScalarType::Byte, std::nullopt, device);
    auto* const workspace = static_cast<OneBitWorkspace*>(memory.mutable_data_ptr());
    pyops::cuda::check(cudaMemsetAsync(&workspace->ticket, 0, sizeof workspace->ticket, on.stream),
                       "onebit_norm");
    with_numbers(span, [&](const auto& source) {
        onebit_norm_kernel<<<ONEBIT_CTAS, CODEC_THREADS, 0, on.stream>>>(
            codec_of(span, std::nullopt), source, workspace,
            static_cast<double*>(out.mutable_data_ptr()));
    });
    check_launch("onebit_norm");
    return out;
}

void onebit_encode_scaled_(const Tensor payload, const Tensor x, const OptionalTensor error,
                           const Tensor scale) {
    const CodecCheck check("onebit_encode_scaled_", true, ONEBIT);
    check.fp32(scale, "scale", 1);
    const CodecSpan span = scaled_span(check, &payload, x, error, SCALED_BLOCK);
    if (span.n == 0) return;
    const Launch on(x);
    with_numbers(span, [&](const auto& source) {
        constexpr auto kernel = onebit_scaled_kernel<std::decay_t<decltype(source)>>;
        kernel<<<grid_of<kernel>(span.blocks(), on), CODEC_THREADS, 0, on.stream>>>(
            codec_of(span, std::nullopt), source,
            static_cast<const float*>(scale.const_data_ptr()));
    });
    check_launch("onebit_encode_scaled_");
}

void sum(const CodecCheck& check, const Tensor& out, const Tensors& payloads,
         const OptionalTensor& scales, int64_t block, double scale, bool accumulate) {
    const auto rows = addresses(payloads);
    const CodecSpan span = sum_span(check, out, payloads, rows, scales, block, scale, accumulate);
    const OneBitRows source{payloads_of(span, check.op)};
    if (span.n == 0) return;
    decode(span, Launch(out), source, check.op);
}

void onebit_decode_(const Tensor out, const Tensor payload, const OptionalTensor scales,
                    int64_t block, double scale, bool accumulate) {
    sum({"onebit_decode_", true, ONEBIT}, out, {payload}, scales, block, scale, accumulate);
}

void onebit_sum_rows_(const Tensor out, const Tensors payloads, const OptionalTensor scales,
                      int64_t block, double scale) {
    sum({"onebit_sum_rows_", true, ONEBIT}, out, payloads, scales, block, scale, false);
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "onebit_encode_", &pyops::cuda::onebit_encode_);
    PYOPS_IMPL(m, "onebit_reencode_", &pyops::cuda::onebit_reencode_);
    PYOPS_IMPL(m, "onebit_norm", &pyops::cuda::onebit_norm);
    PYOPS_IMPL(m, "onebit_encode_scaled_", &pyops::cuda::onebit_encode_scaled_);
    PYOPS_IMPL(m, "onebit_decode_", &pyops::cuda::onebit_decode_);
    PYOPS_IMPL(m, "onebit_sum_rows_", &pyops::cuda::onebit_sum_rows_);
}
