// Eight-bit compression on the GPU: no host synchronisation, no memory of its own.
#include "../../host/box.h"
#include "codec_launch.cuh"
#include "quantize_kernel.cuh"

namespace pyops::cuda {
namespace {

template <int FORMAT, int LINES, typename Source>
void launch_encode(const CodecSpan& span, const Launch& on, const Source& source,
                   const OptionalTensor& flag) {
    constexpr auto kernel = quantize_encode_kernel<FORMAT, LINES, Source>;
    kernel<<<grid_of<kernel>(span.blocks(), on), CODEC_THREADS, 0, on.stream>>>(
        codec_of(span, flag), source);
    check_launch("eight-bit encode");
}

template <int FORMAT, typename Source>
void encode(const CodecSpan& span, const Launch& on, const Source& source,
            const OptionalTensor& flag) {
    if (span.block <= QUANTIZE_LINES * LINE)
        return launch_encode<FORMAT, QUANTIZE_LINES>(span, on, source, flag);
    launch_encode<FORMAT, 0>(span, on, source, flag);
}

// Calls body(constant of the format).
template <typename Body>
void with_format(int format, const Body& body) {
    if (format == INT8) return body(Code<INT8>{});
    if (format == E4M3) return body(Code<E4M3>{});
    body(Code<E5M2>{});
}

void quantize_encode_(const Tensor payload, const Tensor x, const OptionalTensor error,
                      const OptionalTensor flag, int64_t block, const std::string format,
                      bool stochastic_rounding, int64_t seed, int64_t offset) {
    const CodecCheck check("quantize_encode_", true, QUANTIZE);
    const CodecSpan span = encode_span(check, payload, x, error, flag,
                                       {block, format, stochastic_rounding, seed, offset});
    if (span.n == 0) return;
    const Launch on(x);
    with_format(span.rule, [&](auto code) {
        with_numbers(span, [&](const auto& source) {
            encode<decltype(code)::value>(span, on, source, flag);
        });
    });
}

void quantize_reencode_(const Tensor payload, const Tensors payloads, const OptionalTensor error,
                        const OptionalTensor flag, int64_t n, int64_t block,
                        const std::string format, double scale, bool stochastic_rounding,
                        int64_t seed, int64_t offset) {
    const CodecCheck check("quantize_reencode_", true, QUANTIZE);
    const auto rows = addresses(payloads);
    const EncodeOptions options{block, format, stochastic_rounding, seed, offset};
    const CodecSpan span =
        reencode_span(check, payload, payloads, rows, error, flag, n, scale, options);
    const Payloads sources = payloads_of(span, check.op);
    if (n == 0) return;
    const Launch on(payload);
    with_format(span.rule, [&](auto code) {
        constexpr int FORMAT = decltype(code)::value;
        encode<FORMAT>(span, on, RowSum<Codes<FORMAT>>{sources}, flag);
    });
}

void sum(const CodecCheck& check, const Tensor& out, const Tensors& payloads, int64_t block,
         const std::string& format, double scale, bool accumulate) {
    const auto rows = addresses(payloads);
    const int rule = check.rule(format);
    const CodecSpan span =
        sum_span(check, out, payloads, rows, std::nullopt, block, scale, accumulate);
    const Payloads sources = payloads_of(span, check.op);
    if (span.n == 0) return;
    const Launch on(out);
    with_format(rule, [&](auto code) {
        decode(span, on, RowSum<Codes<decltype(code)::value>>{sources}, check.op);
    });
}

void quantize_decode_(const Tensor out, const Tensor payload, int64_t block,
                      const std::string format, double scale, bool accumulate) {
    sum({"quantize_decode_", true, QUANTIZE}, out, {payload}, block, format, scale, accumulate);
}

void quantize_sum_rows_(const Tensor out, const Tensors payloads, int64_t block,
                        const std::string format, double scale) {
    sum({"quantize_sum_rows_", true, QUANTIZE}, out, payloads, block, format, scale, false);
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "quantize_encode_", &pyops::cuda::quantize_encode_);
    PYOPS_IMPL(m, "quantize_reencode_", &pyops::cuda::quantize_reencode_);
    PYOPS_IMPL(m, "quantize_decode_", &pyops::cuda::quantize_decode_);
    PYOPS_IMPL(m, "quantize_sum_rows_", &pyops::cuda::quantize_sum_rows_);
}
