// rotary on tensors: checks, then heads on torch's threads.
#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

Tensor rotary(const Tensor given, const Tensor cos_table, const Tensor sin_table, bool interleaved,
              bool inverse) {
    const int dtype = dtype_code(given);
    require(given.dim() == 4 && dtype >= 0,
            "pyops::rotary: x must be [B, T, H, K] of float32, bfloat16, float16 or float64, got "
            "shape ",
            Shape{given});
    const Tensor x = given.strides()[3] == 1 || given.sizes()[3] <= 1 ? given : dense(given);
    const Tensor cos = dense(cos_table), sin = dense(sin_table);
    const auto sizes = x.sizes(), strides = x.strides(), table = cos.sizes();
    const int64_t B = sizes[0], T = sizes[1], H = sizes[2], K = sizes[3], dims = cos.dim();
    const bool fits = (dims == 2 || dims == 3) && sin.dim() == dims && cos.numel() == sin.numel() &&
                      cos.is_cpu() && sin.is_cpu() && dtype_code(cos) == FP32 &&
                      dtype_code(sin) == FP32 && table[static_cast<size_t>(dims - 2)] == T &&
                      (dims == 2 || table[0] == B) && 2 * table[static_cast<size_t>(dims - 1)] <= K;
    require(fits, "pyops::rotary: cos and sin must be float32 [", T, ", R/2] or [", B, ", ", T,
            ", R/2] with R <= ", K, ", got ", Shape{cos_table}, " and ", Shape{sin_table});
    const std::vector<int64_t> shape = {B, T, H, K};
    Tensor out = in_huge_pages(torch::stable::new_empty(x, shape));
    if (out.numel() == 0) return out;
    RotarySpan span{x.data_ptr(),
                    out.data_ptr(),
                    static_cast<const float*>(cos.data_ptr()),
                    static_cast<const float*>(sin.data_ptr()),
                    {strides[0], strides[1], strides[2]},
                    T,
                    H,
                    K,
                    table[static_cast<size_t>(dims - 1)],
                    0,
                    dtype,
                    interleaved,
                    inverse};
    if (dims == 3) span.table_stride = T * span.half;
    const Kernels& kernel = kernels();
    const int64_t rows = B * T * H;
    if (out.numel() <= SERIAL)
        kernel.rotary(span, 0, rows);
    else
        torch::stable::parallel_for(
            0, rows, 1, [&](int64_t first, int64_t last) { kernel.rotary(span, first, last); });
    return out;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "rotary", &pyops::rotary); }
