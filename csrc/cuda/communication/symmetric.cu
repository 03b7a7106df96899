// symmetric_sum_: the sum of ranks over their symmetric memory. The ranks' tensors come as torch
// maps them into this process.
#include <optional>

#include "../../host/box.h"
#include "../../host/optimizers/table.h"
#include "symmetric.cuh"
#include "symmetric_kernel.cuh"

namespace pyops::cuda {
namespace {

constexpr const char* OP = "symmetric_sum_";

// The dtype code that tensors of one size on one device share.
int check_like(const Tensors& tensors, const Tensor& first, const char* name) {
    const int dtype = dtype_code(tensors[0]);
    require(dtype >= 0 && dtype != FP64, "pyops::", OP, ": ", name,
            " must be float32, bfloat16 or float16");
    for (const Tensor& t : tensors)
        require(t.is_cuda() && t.get_device_index() == first.get_device_index() &&
                    t.is_contiguous() && t.numel() == first.numel() && dtype_code(t) == dtype,
                "pyops::", OP, ": ", name,
                " must be contiguous, of one size and dtype, on one device, got ", Shape{t},
                " beside ", Shape{first});
    return dtype;
}

template <int OUT, int IN, int N, int SIZE>
void launch(const SymmetricSum& a, unsigned ctas, const Launch& on) {
    symmetric_kernel<OUT, IN, N, SIZE><<<ctas, THREADS, 0, on.stream>>>(a);
    check_launch(OP);
}

template <int OUT, int IN>
void for_size(SymmetricSum& a, unsigned ctas, const Launch& on) {
    constexpr int WIDEST = bytes_of(OUT) > bytes_of(IN) ? bytes_of(OUT) : bytes_of(IN);
    constexpr int N = 16 / WIDEST;
    int misaligned = misalignment(a.row[0], bytes_of(IN), N);
    for (int p = 0; p < a.peers.size; ++p)
        misaligned = shared_misalignment(misaligned, a.row[p], bytes_of(IN), N);
    for (int p = 0; p < a.outs; ++p)
        misaligned = shared_misalignment(misaligned, a.out[p], bytes_of(OUT), N);
    if (misaligned < 0) return launch<OUT, IN, 1, 0>(a, ctas, on);
    a.head = head_of(misaligned, N);
    switch (a.peers.size) {
        case 2: return launch<OUT, IN, N, 2>(a, ctas, on);
        case 4: return launch<OUT, IN, N, 4>(a, ctas, on);
        case 8: return launch<OUT, IN, N, 8>(a, ctas, on);
        default: return launch<OUT, IN, N, 0>(a, ctas, on);
    }
}

void symmetric_sum_(const Tensor whole, const Tensors outs, const Tensors rows, const Tensors pads,
                    const Tensor failure, const std::optional<Tensor> norm, int64_t rank,
                    int64_t ctas, double scale, int64_t timeout_ns) {
    SymmetricSum a{};
    a.peers = peers_of({&pads, &failure, rank, ctas, timeout_ns}, OP);
    require(rows.size() == pads.size(), "pyops::", OP, ": ", rows.size(), " rows of ", pads.size(),
            " ranks");
    require(outs.size() == 1 || outs.size() == rows.size(), "pyops::", OP,
            ": takes one out, or one for each rank, got ", outs.size());
    const int in = check_like(rows, rows[0], "rows"), out = check_like(outs, rows[0], "outs");
    require(out == in || out == FP32, "pyops::", OP,
            ": outs must be of the rows' dtype or float32");
    require(whole.is_cuda() && whole.is_contiguous() && dtype_code(whole) == out, "pyops::", OP,
            ": whole must be contiguous and of the outs' dtype, got ", Shape{whole});
    require(!norm || (norm->is_cuda() && dtype_code(*norm) == FP64 && norm->numel() == 2 &&
                      norm->is_contiguous()),
            "pyops::", OP, ": norm must be two float64 on CUDA");
    for (const Tensor& row : rows) a.row[&row - rows.data()] = row.const_data_ptr();
    for (const Tensor& to : outs) a.out[a.outs++] = to.mutable_data_ptr();
    a.numel = rows[0].numel();
    a.scale = static_cast<float>(scale);
    a.norm = norm ? static_cast<double*>(norm->mutable_data_ptr()) : nullptr;
    a.whole = whole.mutable_data_ptr();
    a.whole_numel = whole.numel();
    const Launch on(rows[0]);
    const auto grid = static_cast<unsigned>(ctas);
    if (in == FP32) return for_size<FP32, FP32>(a, grid, on);
    if (in == BF16 && out == BF16) return for_size<BF16, BF16>(a, grid, on);
    if (in == BF16) return for_size<FP32, BF16>(a, grid, on);
    if (out == FP16) return for_size<FP16, FP16>(a, grid, on);
    for_size<FP32, FP16>(a, grid, on);
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "symmetric_sum_", &pyops::cuda::symmetric_sum_);
}
