// Adafactor on CUDA: six launches whatever the number of tensors, nothing waited for.
#include "../../host/box.h"
#include "adafactor_kernel.cuh"
#include "step.cuh"

namespace pyops::cuda {
namespace {

const float* moment(const Tensors& list, size_t i, int64_t numel, const char* name, int device) {
    require(i < list.size() && dtype_code(list[i]) == FP32 && list[i].numel() == numel &&
                list[i].is_contiguous() && list[i].is_cuda() &&
                list[i].get_device_index() == device,
            "pyops::adafactor_: ", name, "[", i, "] must be a contiguous float32 tensor of ", numel,
            " elements on the parameters' device");
    return static_cast<const float*>(list[i].const_data_ptr());
}

double least_root(double eps1, const Tensor& stepped) {
    const int dtype = dtype_code(stepped);
    return eps1 >= 0.0 ? eps1 : dtype == FP32 ? 0x1p-23 : dtype == BF16 ? 0x1p-7 : 0x1p-10;
}

AdafactorPlan plan_of(const Tensors& params, const Tensors& masters, const Tensors& row_vars,
                      const Tensors& col_vars, const Tensors& variances, double eps1, int device) {
    AdafactorPlan plan;
    for (size_t i = 0; i < params.size(); ++i) {
        const Tensor& p = params[i];
        require(p.is_contiguous(), "pyops::adafactor_: params[", i, "] has shape ", Shape{p},
                ": rows and columns need it contiguous");
        const int64_t dims = p.dim(), n = p.numel();
        const bool has_master = i < masters.size() && masters[i].numel() > 0;
        const double least = least_root(eps1, has_master ? masters[i] : p);
        if (n == 0) {
            plan.add(0, 1, 1, nullptr, nullptr, nullptr, least);
        } else if (dims > 1) {
            const int64_t height = p.size(dims - 2), width = p.size(dims - 1),
                          count = n / (height * width);
            plan.add(count, height, width, moment(row_vars, i, count * height, "row_vars", device),
                     moment(col_vars, i, count * width, "col_vars", device), nullptr, least);
        } else {
            plan.add(1, 1, n, nullptr, nullptr, moment(variances, i, n, "variances", device),
                     least);
        }
    }
    return plan;
}

template <auto kernel>
void launch_pass(const AdafactorArguments& a, int64_t work, const Launch& on) {
    kernel<<<grid_for<kernel>(work, on.device, THREADS), THREADS, 0, on.stream>>>(a);
    check_launch("adafactor_");
}

void adafactor_(const Tensors params, const Tensors grads, const Tensors row_vars,
                const Tensors col_vars, const Tensors variances, const Tensors masters,
                const Tensors copies, const Tensors steps, const Scalar lr_tensor,
                const Scalar grad_factor, const Scalar found_inf, double lr, double beta2_decay,
                double eps1, double eps2, double d, double weight_decay, bool maximize,
                bool zero_grads, bool stochastic_rounding, int64_t seed,
                const std::vector<int64_t> offsets) {
    if (params.empty()) return;
    std::vector<int64_t> rows = make_table(
        {&params, &grads, &pyops::NONE, &pyops::NONE, &pyops::NONE, &masters, &copies, &steps},
        offsets, OF_ANY_RULE, "adafactor_");
    const Launch on(params[0]);
    const AdafactorPlan plan =
        plan_of(params, masters, row_vars, col_vars, variances, eps1, on.device);
    rows.insert(rows.end(), plan.rows.begin(), plan.rows.end());
    check_scalar(lr_tensor, "lr_tensor", true, true);
    require(!lr_tensor || lr_tensor->get_device_index() == on.device,
            "pyops: lr_tensor is on another device than the parameters; move it");
    AdafactorArguments a{};
    a.rows = static_cast<int>(params.size());
    a.lr = lr_tensor ? lr_tensor->const_data_ptr() : nullptr;
    a.lr_is_double = lr_tensor && dtype_code(*lr_tensor) == FP64;
    a.grad_factor = one_float(grad_factor, "grad_factor", on);
    a.found_inf = one_float(found_inf, "found_inf", on);
    a.options = {lr, beta2_decay, eps1, eps2, d, weight_decay, maximize};
    a.zero_grads = zero_grads;
    a.seed = static_cast<uint64_t>(seed);
    const Tensor table = upload(rows, on);
    a.table = static_cast<int64_t*>(table.data_ptr());
    a.factors = a.table + static_cast<int64_t>(params.size()) * COLUMNS;
    const Tensor workspace = torch::stable::empty(
        std::vector<int64_t>{plan.workspace()}, torch::headeronly::ScalarType::Double, std::nullopt,
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, on.device));
    a.use(static_cast<double*>(workspace.mutable_data_ptr()), plan);
    launch_pass<adafactor_sums_kernel>(a, plan.tiles, on);
    if (plan.means > 0) launch_pass<adafactor_means_kernel>(a, plan.means, on);
    if (plan.matrices > 0) launch_pass<adafactor_divisors_kernel>(a, plan.matrices, on);
    if (plan.tiles > 0) launch_pass<adafactor_squares_kernel>(a, plan.tiles, on);
    launch_pass<adafactor_scales_kernel>(a, a.rows, on);
    if (stochastic_rounding)
        launch_pass<adafactor_apply_kernel<true>>(a, plan.tiles, on);
    else
        launch_pass<adafactor_apply_kernel<false>>(a, plan.tiles, on);
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) { PYOPS_IMPL(m, "adafactor_", &pyops::cuda::adafactor_); }
