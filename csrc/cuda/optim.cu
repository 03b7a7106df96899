// Adam over a list of tensors or over their table: one launch of a grid that stays, whatever the number of tensors.
//
// Nothing is allocated or copied but the table, which arrives as kernel arguments, and nothing is waited for: a CUDA graph can
// capture all of it.
#include <optional>
#include <vector>

#include "../cpu/table.h"
#include "launch.cuh"
#include "optim_kernel.cuh"
#include "upload.cuh"

namespace pyops::cuda {
namespace {

const float* one_float(const std::optional<Tensor>& scalar, const char* name, const Launch& on) {
  check_scalar(scalar, name, true, false);
  require(!scalar || scalar->get_device_index() == on.device, "pyops: ", name, " is on another device than the parameters; move it");
  return scalar ? static_cast<const float*>(scalar->const_data_ptr()) : nullptr;
}

struct Scalars {
  std::optional<Tensor> lr, grad_factor, found_inf;
  AdamOptions options;
  bool zero_grads, stochastic_rounding;
  uint64_t seed;
};

template <bool SR>
void launch(const AdamArguments& a, const Launch& on) {
  constexpr auto kernel = adam_kernel<SR>;
  kernel<<<resident_ctas<kernel>(on.device, THREADS), THREADS, 0, on.stream>>>(a);
  check_launch("adam_");
}

void run(const Tensor& table, const Scalars& s, const Launch& on) {
  AdamArguments a{};
  a.table = static_cast<int64_t*>(table.data_ptr());
  a.rows = static_cast<int>(table.size(0));
  check_scalar(s.lr, "lr_tensor", true, true);
  require(!s.lr || s.lr->get_device_index() == on.device, "pyops: lr_tensor is on another device than the parameters; move it");
  a.lr = s.lr ? s.lr->const_data_ptr() : nullptr;
  a.lr_is_double = s.lr && dtype_code(*s.lr) == FP64;
  a.grad_factor = one_float(s.grad_factor, "grad_factor", on);
  a.found_inf = one_float(s.found_inf, "found_inf", on);
  a.options = s.options;
  a.zero_grads = s.zero_grads;
  a.seed = s.seed;
  if (s.stochastic_rounding) return launch<true>(a, on);
  launch<false>(a, on);
}

void adam_(const Tensors params, const Tensors grads, const Tensors exp_avgs, const Tensors exp_avg_sqs,
           const Tensors max_exp_avg_sqs, const Tensors masters, const Tensors copies, const Tensors steps,
           const std::optional<Tensor> lr_tensor, const std::optional<Tensor> grad_factor, const std::optional<Tensor> found_inf,
           double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize, bool zero_grads,
           bool stochastic_rounding, int64_t seed, const std::vector<int64_t> offsets) {
  if (params.empty()) return;
  const std::vector<int64_t> rows = make_table(
      {&params, &grads, &exp_avgs, &exp_avg_sqs, &max_exp_avg_sqs, &masters, &copies, &steps}, offsets,
      OF_ANY_RULE | set_of(EXP_AVG, EXP_AVG_SQ), "adam_");
  const Launch on(params[0]);
  const Scalars scalars{lr_tensor, grad_factor, found_inf, {lr, beta1, beta2, eps, weight_decay, decoupled, maximize}, zero_grads,
                        stochastic_rounding, static_cast<uint64_t>(seed)};
  run(upload(rows, on), scalars, on);
}

void adam_from_table_(const Tensor table, const std::optional<Tensor> lr_tensor, const std::optional<Tensor> grad_factor,
                      const std::optional<Tensor> found_inf, double lr, double beta1, double beta2, double eps,
                      double weight_decay, bool decoupled, bool maximize, bool zero_grads, bool stochastic_rounding, int64_t seed) {
  if (check_table(table, "adam_from_table_") == 0) return;
  const Scalars scalars{lr_tensor, grad_factor, found_inf, {lr, beta1, beta2, eps, weight_decay, decoupled, maximize}, zero_grads,
                        stochastic_rounding, static_cast<uint64_t>(seed)};
  run(table, scalars, Launch(table));
}

}  // namespace
}  // namespace pyops::cuda

STABLE_TORCH_LIBRARY_IMPL(pyops, CUDA, m) {
  m.impl("adam_", TORCH_BOX(&pyops::cuda::adam_));
  m.impl("adam_from_table_", TORCH_BOX(&pyops::cuda::adam_from_table_));
}
