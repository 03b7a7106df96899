// One-bit compression of tensors: checks, then blocks on torch's threads.
#include "../math/onebit.h"
#include "codec_loop.h"

namespace pyops {
namespace {

constexpr int64_t MULTIPLE = 64;      // of a block
constexpr int64_t NORM_BLOCK = 16384;  // elements of one partial sum

int rule_of(const CodecCheck& check, const std::string& rule) { return check.choice(rule, "rule", {"l1", "rms"}); }

void onebit_encode_(const Tensor payload, const Tensor x, const std::optional<Tensor> error, const std::optional<Tensor> flag,
                    int64_t block, const std::string rule) {
    const CodecCheck check{"onebit_encode_", false};
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.rule = rule_of(check, rule);
    span.dtype = check.numbers(x, "x");
    span.n = x.numel();
    span.block = block;
    check.payload(payload, onebit_bytes(span.n, block));
    check.fp32(error, "error", span.n);
    check.fp32(flag, "flag", 1);
    span.x = x.data_ptr();
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    encode_all(span, kernels().onebit_encode, flag);
}

void onebit_reencode_(const Tensor payload, const Tensors payloads, const std::optional<Tensor> error,
                      const std::optional<Tensor> flag, int64_t n, int64_t block, double scale, const std::string rule) {
    const CodecCheck check{"onebit_reencode_", false};
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.rule = rule_of(check, rule);
    span.n = n;
    span.block = block;
    check.payload(payload, onebit_bytes(n, block));
    check.payloads(payloads, onebit_bytes(n, block));
    check.fp32(error, "error", n);
    check.fp32(flag, "flag", 1);
    const std::vector<const uint8_t*> rows = addresses(payloads);
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.scale = static_cast<float>(scale);
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    encode_all(span, kernels().onebit_encode, flag);
}

Tensor onebit_norm(const Tensor x, const std::optional<Tensor> error) {
    const CodecCheck check{"onebit_norm", false};
    const int dtype = check.numbers(x, "x");
    const int64_t n = x.numel(), size = dtype == FP32 ? 4 : 2, parts = blocks_of(n, NORM_BLOCK);
    check.fp32(error, "error", n);
    const char* const data = static_cast<const char*>(x.data_ptr());
    const float* const errors = data_of(error);
    std::vector<double> sums(static_cast<size_t>(3 * parts));
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part) {
            const int64_t begin = part * NORM_BLOCK;
            kernel.onebit_sums(data + begin * size, dtype, errors ? errors + begin : nullptr, std::min(NORM_BLOCK, n - begin), &sums[static_cast<size_t>(3 * part)]);
        }
    };
    if (parts <= 2) run(0, parts);
    else torch::stable::parallel_for(0, parts, 1, run);
    const std::vector<int64_t> shape = {3};
    Tensor out = torch::stable::empty(shape, torch::headeronly::ScalarType::Double);
    double* const total = static_cast<double*>(out.data_ptr());
    total[0] = total[1] = total[2] = 0.0;
    for (size_t i = 0; i < sums.size(); ++i) total[i % 3] += sums[i];
    return out;
}

void onebit_encode_scaled_(const Tensor payload, const Tensor x, const std::optional<Tensor> error, const Tensor scale) {
    const CodecCheck check{"onebit_encode_scaled_", false};
    CodecSpan span;
    span.dtype = check.numbers(x, "x");
    span.n = x.numel();
    check.payload(payload, (span.n + 7) / 8);
    check.fp32(error, "error", span.n);
    check.fp32(scale, "scale", 1);
    if (span.n == 0) return;
    span.x = x.data_ptr();
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    const float factor = *static_cast<const float*>(scale.data_ptr());
    const Kernels& kernel = kernels();
    for_each_part(span.n, [&](int64_t begin, int64_t end) { kernel.onebit_encode_scaled(span, begin, end, factor); });
}

void sum(const CodecCheck& check, const Tensor& out, const Tensors& payloads, const std::optional<Tensor>& scales, int64_t block,
         double scale, bool accumulate) {
    CodecSpan span;
    check.block(block, MULTIPLE);
    span.dtype_out = check.numbers(out, "out");
    span.n = out.numel();
    span.block = block;
    check.payloads(payloads, scales ? (span.n + 7) / 8 : onebit_bytes(span.n, block));
    check.fp32(scales, "scales", static_cast<int64_t>(payloads.size()));
    const std::vector<const uint8_t*> rows = addresses(payloads);
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.row_scales = data_of(scales);
    span.scale = static_cast<float>(scale);
    span.out = out.data_ptr();
    span.accumulate = accumulate;
    span.streams = span.n >= STREAMED_NUMEL;
    const Kernels& kernel = kernels();
    for_blocks(span, [&](int64_t first, int64_t last) { kernel.onebit_sum(span, first, last); });
}

void onebit_decode_(const Tensor out, const Tensor payload, const std::optional<Tensor> scales, int64_t block, double scale,
                    bool accumulate) {
    sum({"onebit_decode_", false}, out, {payload}, scales, block, scale, accumulate);
}

void onebit_sum_rows_(const Tensor out, const Tensors payloads, const std::optional<Tensor> scales, int64_t block, double scale) {
    sum({"onebit_sum_rows_", false}, out, payloads, scales, block, scale, false);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    m.impl("onebit_encode_", TORCH_BOX(&pyops::onebit_encode_));
    m.impl("onebit_reencode_", TORCH_BOX(&pyops::onebit_reencode_));
    m.impl("onebit_norm", TORCH_BOX(&pyops::onebit_norm));
    m.impl("onebit_encode_scaled_", TORCH_BOX(&pyops::onebit_encode_scaled_));
    m.impl("onebit_decode_", TORCH_BOX(&pyops::onebit_decode_));
    m.impl("onebit_sum_rows_", TORCH_BOX(&pyops::onebit_sum_rows_));
}
