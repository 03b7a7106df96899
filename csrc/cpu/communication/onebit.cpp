// One-bit compression of tensors: checks, then blocks on torch's threads.
#include "../../host/box.h"
#include "codec_loop.h"

namespace pyops {
namespace {

constexpr int64_t NORM_BLOCK = 16384;  // elements of one partial sum

void onebit_encode_(const Tensor payload, const Tensor x, const OptionalTensor error,
                    const OptionalTensor flag, int64_t block, const std::string rule) {
    const CodecCheck check("onebit_encode_", false, ONEBIT);
    encode_blocks(encode_span(check, payload, x, error, flag, {block, rule}),
                  kernels().onebit_encode, flag);
}

void onebit_reencode_(const Tensor payload, const Tensors payloads, const OptionalTensor error,
                      const OptionalTensor flag, int64_t n, int64_t block, double scale,
                      const std::string rule) {
    const CodecCheck check("onebit_reencode_", false, ONEBIT);
    const auto rows = addresses(payloads);
    const CodecSpan span =
        reencode_span(check, payload, payloads, rows, error, flag, n, scale, {block, rule});
    encode_blocks(span, kernels().onebit_encode, flag);
}

Tensor onebit_norm(const Tensor x, const OptionalTensor error) {
    const CodecCheck check("onebit_norm", false, ONEBIT);
    const CodecSpan span = scaled_span(check, nullptr, x, error, NORM_BLOCK);
    const int64_t parts = span.blocks(), size = span.dtype == FP32 ? 4 : 2;
    const char* const data = static_cast<const char*>(span.x);
    std::vector<double> sums(static_cast<size_t>(3 * parts));
    const Kernels& kernel = kernels();
    for_blocks(span, [&](int64_t first, int64_t last) {
        for (int64_t part = first; part < last; ++part) {
            const int64_t begin = part * NORM_BLOCK, n = std::min(NORM_BLOCK, span.n - begin);
            kernel.onebit_sums(data + begin * size, span.dtype,
                               span.error ? span.error + begin : nullptr, n,
                               &sums[static_cast<size_t>(3 * part)]);
        }
    });
    const std::vector<int64_t> shape = {3};
    Tensor out = torch::stable::empty(shape, torch::headeronly::ScalarType::Double);
    double* const total = static_cast<double*>(out.data_ptr());
    total[0] = total[1] = total[2] = 0.0;
    for (size_t i = 0; i < sums.size(); ++i) total[i % 3] += sums[i];
    return out;
}

void onebit_encode_scaled_(const Tensor payload, const Tensor x, const OptionalTensor error,
                           const Tensor scale) {
    const CodecCheck check("onebit_encode_scaled_", false, ONEBIT);
    check.fp32(scale, "scale", 1);
    const CodecSpan span = scaled_span(check, &payload, x, error, CUT);
    const float factor = *static_cast<const float*>(scale.data_ptr());
    const Kernels& kernel = kernels();
    for_each_part(span.n, [&](int64_t begin, int64_t end) {
        kernel.onebit_encode_scaled(span, begin, end, factor);
    });
}

void onebit_decode_(const Tensor out, const Tensor payload, const OptionalTensor scales,
                    int64_t block, double scale, bool accumulate) {
    const CodecCheck check("onebit_decode_", false, ONEBIT);
    const Tensors payloads{payload};
    const auto rows = addresses(payloads);
    sum_blocks(sum_span(check, out, payloads, rows, scales, block, scale, accumulate),
               kernels().onebit_sum);
}

void onebit_sum_rows_(const Tensor out, const Tensors payloads, const OptionalTensor scales,
                      int64_t block, double scale) {
    const CodecCheck check("onebit_sum_rows_", false, ONEBIT);
    const auto rows = addresses(payloads);
    sum_blocks(sum_span(check, out, payloads, rows, scales, block, scale, false),
               kernels().onebit_sum);
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "onebit_encode_", &pyops::onebit_encode_);
    PYOPS_IMPL(m, "onebit_reencode_", &pyops::onebit_reencode_);
    PYOPS_IMPL(m, "onebit_norm", &pyops::onebit_norm);
    PYOPS_IMPL(m, "onebit_encode_scaled_", &pyops::onebit_encode_scaled_);
    PYOPS_IMPL(m, "onebit_decode_", &pyops::onebit_decode_);
    PYOPS_IMPL(m, "onebit_sum_rows_", &pyops::onebit_sum_rows_);
}
