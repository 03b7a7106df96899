// For the codecs' ops (onebit, quantize), on the CPU and on CUDA: what must fit together, checked before anything is written.
#pragma once
#include <string>

#include "table.h"

namespace pyops {

struct CodecCheck {
    const char* op;
    bool on_cuda;

    void place(const Tensor& t, const char* name) const {
        require(t.is_cuda() == on_cuda, "pyops::", op, ": ", name, " is on another device; move it");
        require(t.is_contiguous(), "pyops::", op, ": ", name, " must be contiguous, got ", Shape{t});
    }

    // fp32, bf16 or fp16; returns the dtype code.
    int numbers(const Tensor& t, const char* name) const {
        const int dtype = dtype_code(t);
        require(dtype >= 0 && dtype != FP64, "pyops::", op, ": ", name, " must be float32, bfloat16 or float16; cast it");
        place(t, name);
        return dtype;
    }

    void fp32(const Tensor& t, const char* name, int64_t n) const {
        require(dtype_code(t) == FP32, "pyops::", op, ": ", name, " must be float32; cast it");
        place(t, name);
        require(t.numel() == n, "pyops::", op, ": ", name, " must have ", n, " elements, got ", t.numel());
    }

    void fp32(const std::optional<Tensor>& t, const char* name, int64_t n) const {
        if (t) fp32(*t, name, n);
    }

    void payload(const Tensor& t, int64_t bytes) const {
        int32_t dtype = 0;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
        require(dtype == aoti_torch_dtype_uint8(), "pyops::", op, ": a payload must be uint8; cast it");
        place(t, "a payload");
        require(t.numel() == bytes, "pyops::", op, ": a payload must have ", bytes, " bytes for these numbers, got ", t.numel());
    }

    void payloads(const Tensors& rows, int64_t bytes) const {
        require(!rows.empty(), "pyops::", op, ": needs at least one payload");
        for (const Tensor& row : rows) payload(row, bytes);
    }

    void block(int64_t block, int64_t multiple) const {
        require(block > 0 && block % multiple == 0, "pyops::", op, ": block must be a positive multiple of ", multiple, ", got ", block);
    }

    // The place of `name` among the choices, of which there are up to three.
    int choice(const std::string& name, const char* what, std::initializer_list<const char*> choices) const {
        int index = 0;
        for (const char* choice : choices) {
            if (name == choice) return index;
            ++index;
        }
        std::string all;
        for (const char* choice : choices) all += std::string(all.empty() ? "" : ", ") + choice;
        require(false, "pyops::", op, ": ", what, " must be one of ", all, ", got ", name);
        return -1;
    }
};

inline int64_t blocks_of(int64_t n, int64_t block) { return (n + block - 1) / block; }
inline int64_t onebit_bytes(int64_t n, int64_t block) { return 4 * blocks_of(n, block) + (n + 7) / 8; }
inline int64_t quantize_bytes(int64_t n, int64_t block) { return 4 * blocks_of(n, block) + n; }

}  // namespace pyops
