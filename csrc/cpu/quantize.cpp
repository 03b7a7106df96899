// Eight-bit compression of tensors: checks, then blocks on torch's threads.
#include "../math/quantize.h"
#include "codec_loop.h"

namespace pyops {
namespace {

constexpr int64_t MULTIPLE = 32;  // of a block

int format_of(const CodecCheck& check, const std::string& format) { return check.choice(format, "format", {"int8", "e4m3", "e5m2"}); }

void quantize_encode_(const Tensor payload, const Tensor x, const std::optional<Tensor> error, const std::optional<Tensor> flag,
                      int64_t block, const std::string format, bool stochastic_rounding, int64_t seed, int64_t offset) {
    const CodecCheck check{"quantize_encode_", false};
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.rule = format_of(check, format);
    span.dtype = check.numbers(x, "x");
    span.n = x.numel();
    span.block = block;
    check.payload(payload, quantize_bytes(span.n, block));
    check.fp32(error, "error", span.n);
    check.fp32(flag, "flag", 1);
    span.x = x.data_ptr();
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    span.stochastic_rounding = stochastic_rounding;
    span.seed = static_cast<uint64_t>(seed);
    span.offset = static_cast<uint64_t>(offset);
    encode_all(span, kernels().quantize_encode, flag);
}

void quantize_reencode_(const Tensor payload, const Tensors payloads, const std::optional<Tensor> error,
                        const std::optional<Tensor> flag, int64_t n, int64_t block, const std::string format, double scale,
                        bool stochastic_rounding, int64_t seed, int64_t offset) {
    const CodecCheck check{"quantize_reencode_", false};
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.rule = format_of(check, format);
    span.n = n;
    span.block = block;
    check.payload(payload, quantize_bytes(n, block));
    check.payloads(payloads, quantize_bytes(n, block));
    check.fp32(error, "error", n);
    check.fp32(flag, "flag", 1);
    const std::vector<const uint8_t*> rows = addresses(payloads);
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.scale = static_cast<float>(scale);
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    span.stochastic_rounding = stochastic_rounding;
    span.seed = static_cast<uint64_t>(seed);
    span.offset = static_cast<uint64_t>(offset);
    encode_all(span, kernels().quantize_encode, flag);
}

void sum(const CodecCheck& check, const Tensor& out, const Tensors& payloads, int64_t block, const std::string& format,
         double scale, bool accumulate) {
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.rule = format_of(check, format);
    span.dtype_out = check.numbers(out, "out");
    span.n = out.numel();
    span.block = block;
    check.payloads(payloads, quantize_bytes(span.n, block));
    const std::vector<const uint8_t*> rows = addresses(payloads);
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.scale = static_cast<float>(scale);
    span.out = out.data_ptr();
    span.accumulate = accumulate;
    span.streams = span.n >= STREAMED_NUMEL;
    const Kernels& kernel = kernels();
    for_blocks(span, [&](int64_t first, int64_t last) { kernel.quantize_sum(span, first, last); });
}

void quantize_decode_(const Tensor out, const Tensor payload, int64_t block, const std::string format, double scale,
                      bool accumulate) {
    sum({"quantize_decode_", false}, out, {payload}, block, format, scale, accumulate);
}

void quantize_sum_rows_(const Tensor out, const Tensors payloads, int64_t block, const std::string format, double scale) {
    sum({"quantize_sum_rows_", false}, out, payloads, block, format, scale, false);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("quantize_encode_", TORCH_BOX(&pyops::quantize_encode_));
    m.impl("quantize_reencode_", TORCH_BOX(&pyops::quantize_reencode_));
    m.impl("quantize_decode_", TORCH_BOX(&pyops::quantize_decode_));
    m.impl("quantize_sum_rows_", TORCH_BOX(&pyops::quantize_sum_rows_));
}
