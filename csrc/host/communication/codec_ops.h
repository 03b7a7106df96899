// For the codecs' ops (onebit, quantize), on the CPU and on CUDA: what must fit together, checked
// before anything is written.
#pragma once
#include <string>

#include "codec.h"
#include "../optimizers/table.h"

namespace pyops {

// What the two families differ in. A block is a multiple of `multiple`; `body(n)` are the bytes of
// n bits or codes.
struct Family {
    int64_t multiple;
    int64_t (*body)(int64_t n);
    const char* what;
    std::initializer_list<const char*> rules;
};

inline const Family ONEBIT{64, [](int64_t n) { return (n + 7) / 8; }, "rule", {"l1", "rms"}};
inline const Family QUANTIZE{32, [](int64_t n) { return n; }, "format", {"int8", "e4m3", "e5m2"}};

class CodecCheck {
public:
    CodecCheck(const char* op, bool on_cuda, const Family& family)
        : op(op), on_cuda(on_cuda), family(family) {}

    const char* const op;
    const bool on_cuda;
    const Family& family;

    void place(const Tensor& t, const char* name) const {
        if (on_cuda && t.is_cuda() && device < 0) device = t.get_device_index();
        require(t.is_cuda() == on_cuda && (!on_cuda || t.get_device_index() == device),
                "pyops::", op, ": ", name, " is on another device; move it");
        require(t.is_contiguous(), "pyops::", op, ": ", name, " must be contiguous, got ",
                Shape{t});
    }

    // fp32, bf16 or fp16; returns the dtype code.
    int numbers(const Tensor& t, const char* name) const {
        const int dtype = dtype_code(t);
        require(dtype >= 0 && dtype != FP64, "pyops::", op, ": ", name,
                " must be float32, bfloat16 or float16; cast it");
        place(t, name);
        return dtype;
    }

    void fp32(const Tensor& t, const char* name, int64_t n) const {
        require(dtype_code(t) == FP32, "pyops::", op, ": ", name, " must be float32; cast it");
        place(t, name);
        require(t.numel() == n, "pyops::", op, ": ", name, " must have ", n, " elements, got ",
                t.numel());
    }

    void fp32(const std::optional<Tensor>& t, const char* name, int64_t n) const {
        if (t) fp32(*t, name, n);
    }

    void payload(const Tensor& t, int64_t bytes) const {
        int32_t dtype = 0;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
        require(dtype == aoti_torch_dtype_uint8(), "pyops::", op,
                ": a payload must be uint8; cast it");
        place(t, "a payload");
        require(t.numel() == bytes, "pyops::", op, ": a payload must have ", bytes,
                " bytes for these numbers, got ", t.numel());
    }

    void payloads(const Tensors& rows, int64_t bytes) const {
        require(!rows.empty(), "pyops::", op, ": needs at least one payload");
        for (const Tensor& row : rows) payload(row, bytes);
    }

    void block(int64_t block) const {
        require(block > 0 && block % family.multiple == 0, "pyops::", op,
                ": block must be a positive multiple of ", family.multiple, ", got ", block);
    }

    int64_t bytes(int64_t n, int64_t block) const {
        return 4 * ((n + block - 1) / block) + family.body(n);
    }

    // The place of a rule's or format's name among the choices.
    int rule(const std::string& name) const {
        int index = 0;
        std::string all;
        for (const char* choice : family.rules) {
            if (name == choice) return index;
            all += std::string(index++ ? ", " : "") + choice;
        }
        require(false, "pyops::", op, ": ", family.what, " must be one of ", all, ", got ", name);
        return -1;
    }

private:
    mutable int device = -1;  // of the first CUDA tensor that was looked at
};

using OptionalTensor = std::optional<Tensor>;

inline float* data_of(const OptionalTensor& t) {
    return t && t->numel() ? static_cast<float*>(t->data_ptr()) : nullptr;
}

inline std::vector<const uint8_t*> addresses(const Tensors& payloads) {
    std::vector<const uint8_t*> out;
    for (const Tensor& payload : payloads)
        out.push_back(static_cast<const uint8_t*>(payload.data_ptr()));
    return out;
}

// What an encode is told besides its source.
struct EncodeOptions {
    int64_t block;
    const std::string& rule;
    bool stochastic_rounding = false;
    int64_t seed = 0, offset = 0;
};

inline CodecSpan target_of(const CodecCheck& check, const Tensor& payload,
                           const OptionalTensor& error, const OptionalTensor& flag, int64_t n,
                           const EncodeOptions& options) {
    check.block(options.block);
    CodecSpan span;
    span.rule = check.rule(options.rule);
    span.n = n;
    span.block = options.block;
    check.payload(payload, check.bytes(n, options.block));
    check.fp32(error, "error", n);
    check.fp32(flag, "flag", 1);
    span.error = data_of(error);
    span.payload = static_cast<uint8_t*>(payload.data_ptr());
    span.stochastic_rounding = options.stochastic_rounding;
    span.seed = static_cast<uint64_t>(options.seed);
    span.offset = static_cast<uint64_t>(options.offset);
    return span;
}

inline CodecSpan encode_span(const CodecCheck& check, const Tensor& payload, const Tensor& x,
                             const OptionalTensor& error, const OptionalTensor& flag,
                             const EncodeOptions& options) {
    const int dtype = check.numbers(x, "x");
    CodecSpan span = target_of(check, payload, error, flag, x.numel(), options);
    span.dtype = dtype;
    span.x = x.data_ptr();
    return span;
}

// `rows` are the addresses of `payloads`, and must live as long as the span.
inline CodecSpan reencode_span(const CodecCheck& check, const Tensor& payload,
                               const Tensors& payloads, const std::vector<const uint8_t*>& rows,
                               const OptionalTensor& error, const OptionalTensor& flag, int64_t n,
                               double scale, const EncodeOptions& options) {
    CodecSpan span = target_of(check, payload, error, flag, n, options);
    check.payloads(payloads, check.bytes(n, options.block));
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.scale = static_cast<float>(scale);
    return span;
}

inline CodecSpan sum_span(const CodecCheck& check, const Tensor& out, const Tensors& payloads,
                          const std::vector<const uint8_t*>& rows, const OptionalTensor& scales,
                          int64_t block, double scale, bool accumulate) {
    check.block(block);
    CodecSpan span;
    span.dtype_out = check.numbers(out, "out");
    span.n = out.numel();
    span.block = block;
    check.payloads(payloads, scales ? check.family.body(span.n) : check.bytes(span.n, block));
    check.fp32(scales, "scales", static_cast<int64_t>(payloads.size()));
    span.rows = rows.data();
    span.num_rows = static_cast<int>(rows.size());
    span.row_scales = data_of(scales);
    span.scale = static_cast<float>(scale);
    span.out = out.data_ptr();
    span.accumulate = accumulate;
    return span;
}

// One scale for all: the payload is bits alone. `block` is only how the work is cut.
inline CodecSpan scaled_span(const CodecCheck& check, const Tensor* payload, const Tensor& x,
                             const OptionalTensor& error, int64_t block) {
    CodecSpan span;
    span.dtype = check.numbers(x, "x");
    span.n = x.numel();
    span.block = block;
    if (payload) check.payload(*payload, check.family.body(span.n));
    check.fp32(error, "error", span.n);
    span.x = x.data_ptr();
    span.error = data_of(error);
    span.payload = payload ? static_cast<uint8_t*>(payload->data_ptr()) : nullptr;
    return span;
}

}  // namespace pyops
