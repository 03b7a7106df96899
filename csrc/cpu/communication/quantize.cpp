// Eight-bit compression of tensors: checks, then blocks on torch's threads.
#include "../../host/box.h"
#include "codec_loop.h"

namespace pyops {
namespace {

void quantize_encode_(const Tensor payload, const Tensor x, const OptionalTensor error,
                      const OptionalTensor flag, int64_t block, const std::string format,
                      bool stochastic_rounding, int64_t seed, int64_t offset) {
    const CodecCheck check("quantize_encode_", false, QUANTIZE);
    const EncodeOptions options{block, format, stochastic_rounding, seed, offset};
    encode_blocks(encode_span(check, payload, x, error, flag, options), kernels().quantize_encode,
                  flag);
}

void quantize_reencode_(const Tensor payload, const Tensors payloads, const OptionalTensor error,
                        const OptionalTensor flag, int64_t n, int64_t block,
                        const std::string format, double scale, bool stochastic_rounding,
                        int64_t seed, int64_t offset) {
    const CodecCheck check("quantize_reencode_", false, QUANTIZE);
    const auto rows = addresses(payloads);
    const EncodeOptions options{block, format, stochastic_rounding, seed, offset};
    encode_blocks(reencode_span(check, payload, payloads, rows, error, flag, n, scale, options),
                  kernels().quantize_encode, flag);
}

void sum(const CodecCheck& check, const Tensor& out, const Tensors& payloads, int64_t block,
         const std::string& format, double scale, bool accumulate) {
    const auto rows = addresses(payloads);
    const int rule = check.rule(format);
    CodecSpan span = sum_span(check, out, payloads, rows, std::nullopt, block, scale, accumulate);
    span.rule = rule;
    sum_blocks(span, kernels().quantize_sum);
}

void quantize_decode_(const Tensor out, const Tensor payload, int64_t block,
                      const std::string format, double scale, bool accumulate) {
    sum({"quantize_decode_", false, QUANTIZE}, out, {payload}, block, format, scale, accumulate);
}

void quantize_sum_rows_(const Tensor out, const Tensors payloads, int64_t block,
                        const std::string format, double scale) {
    sum({"quantize_sum_rows_", false, QUANTIZE}, out, payloads, block, format, scale, false);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "quantize_encode_", &pyops::quantize_encode_);
    PYOPS_IMPL(m, "quantize_reencode_", &pyops::quantize_reencode_);
    PYOPS_IMPL(m, "quantize_decode_", &pyops::quantize_decode_);
    PYOPS_IMPL(m, "quantize_sum_rows_", &pyops::quantize_sum_rows_);
}
