// A bias as the kernels take it: contiguous fp32 (float64 for float64); zeros where there is none,
// if the kernel needs them.
#pragma once
#include "../kernels.h"
#include "../calls/layer_tensors.h"

namespace pyops {

using Bias = std::optional<Tensor>;

class WideBias {
public:
    WideBias(const Bias& bias, int64_t columns, int dtype, bool zeros_for_none = true) {
        if (bias && (dtype == FP32 || dtype == FP64)) {
            kept_ = dense(*bias);
            data_ = kept_->data_ptr();
            return;
        }
        if (!bias && !zeros_for_none) return;
        storage_.assign(static_cast<size_t>(columns) * (dtype == FP64 ? 2 : 1), 0.0f);
        data_ = storage_.data();
        if (!bias || !columns) return;
        kept_ = dense(*bias);
        kernels().scale_cast(storage_.data(), kept_->data_ptr(), columns, FP32, dtype, 1.0);
    }
    const void* data() const { return data_; }

    // Throws unless `bias`, if there is one, is [columns] of x's dtype and device.
    static void check(const Bias& bias, const Tensor& x, int64_t columns, const char* op) {
        if (!bias) return;
        require(bias->dim() == 1 && bias->numel() == columns &&
                    dtype_code(*bias) == dtype_code(x) && bias->is_cpu() == x.is_cpu(),
                "pyops::", op, ": bias must be [", columns, "] of x's dtype and device, got shape ",
                Shape{*bias});
    }

private:
    std::optional<Tensor> kept_;
    std::vector<float> storage_;
    const void* data_ = nullptr;
};

}  // namespace pyops
