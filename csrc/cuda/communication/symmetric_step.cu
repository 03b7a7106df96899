// symmetric_adam_from_table_: Adam on the shards of all ranks, between the sum of their gradients
// and the gathering of their parameters, in one kernel.
#include "../../host/box.h"
#include "../../math/optimizers/adam.h"
#include "../optimizers/step.cuh"
#include "symmetric.cuh"
#include "symmetric_step.cuh"

namespace pyops::cuda {
namespace {

constexpr const char* NAME_OF_STEP = "symmetric_adam_from_table_";

// Bytes from this rank's buffer to that of each rank.
void set_shifts(int64_t (&shifts)[MAX_PEERS], const Tensors& of, const Peers& peers,
                const char* name) {
    require(static_cast<int>(of.size()) == peers.size, "pyops::", NAME_OF_STEP, ": ", of.size(),
            " ", name, " of ", peers.size, " ranks");
    const Tensor& mine = of[static_cast<size_t>(peers.rank)];
    const auto from = reinterpret_cast<int64_t>(mine.data_ptr());
    for (int p = 0; p < peers.size; ++p) {
        const Tensor& t = of[static_cast<size_t>(p)];
        require(t.is_cuda() && t.get_device_index() == mine.get_device_index() &&
                    t.is_contiguous() && t.numel() == mine.numel() &&
                    dtype_code(t) == dtype_code(mine) && dtype_code(t) >= 0,
                "pyops::", NAME_OF_STEP, ": ", name,
                " must be contiguous, of one size and dtype, on one device, got ", Shape{t},
                " beside ", Shape{mine});
        shifts[p] = reinterpret_cast<int64_t>(t.data_ptr()) - from;
        require(shifts[p] % 16 == 0, "pyops::", NAME_OF_STEP, ": ", name,
                " must begin at the same place within 16 bytes on all ranks");
    }
}

void symmetric_adam_from_table_(const Tensor table, const Tensors grads, const Tensors params,
                                const Tensors pads, const Tensor failure, const Scalar lr_tensor,
                                const Scalar grad_factor, const Scalar found_inf, int64_t rank,
                                int64_t ctas, double scale, bool in_fp32, int64_t timeout_ns,
                                double lr, double beta1, double beta2, double eps,
                                double weight_decay, bool decoupled, bool maximize) {
    SymmetricStep<Adam> a{};
    a.peers = peers_of({&pads, &failure, rank, ctas, timeout_ns}, NAME_OF_STEP);
    set_shifts(a.grads, grads, a.peers, "gradients");
    set_shifts(a.params, params, a.peers, "parameters");
    a.step.rows =
        static_cast<int>(check_table(table, NAME_OF_STEP));  // 0: others wait for this rank, too
    a.step.table = static_cast<int64_t*>(table.data_ptr());
    const Launch on(pads[0]);
    check_scalar(lr_tensor, "lr_tensor", true, true);
    require(!lr_tensor || lr_tensor->get_device_index() == on.device,
            "pyops: lr_tensor is on another device than the parameters; move it");
    a.step.lr = lr_tensor ? lr_tensor->const_data_ptr() : nullptr;
    a.step.lr_is_double = lr_tensor && dtype_code(*lr_tensor) == FP64;
    a.step.grad_factor = one_float(grad_factor, "grad_factor", on);
    a.step.found_inf = one_float(found_inf, "found_inf", on);
    a.step.options = {lr, beta1, beta2, eps, weight_decay, decoupled, maximize};
    a.scale = static_cast<float>(scale);
    a.in_fp32 = in_fp32;
    symmetric_step_kernel<Adam><<<static_cast<unsigned>(ctas), THREADS, 0, on.stream>>>(a);
    check_launch(NAME_OF_STEP);
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
    PYOPS_IMPL(m, "symmetric_adam_from_table_", &pyops::cuda::symmetric_adam_from_table_);
}
