// int8_linear on tensors: checks, then panels of outputs on torch's threads.
#include "int8_linear.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "../host/box.h"
#include "kernels.h"
#include "loop.h"
#include "scaled_sums.h"

namespace pyops {
namespace {

constexpr int64_t ROWS_OF_A_TASK = 960;

bool has_vnni() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512vnni");
#else
    return false;
#endif
}

Tensor int8_linear(const Tensor a, const Tensor weight, const Tensor row_scales,
                   const Tensor column_scales, const std::optional<Tensor> row_zeros,
                   const std::optional<Tensor> sums, const std::optional<Tensor> bias,
                   ScalarType dtype) {
    const char* const op = "int8_linear";
    require(a.dim() == 2 && weight.dim() == 2 && a.sizes()[1] == weight.sizes()[1], "pyops::", op,
            ": a must be int8 [rows, K] and weight int8 [out, K], got shapes ", Shape{a}, " and ",
            Shape{weight});
    Int8Linear layer{};
    layer.rows = a.sizes()[0];
    layer.inner = a.sizes()[1];
    layer.outputs = weight.sizes()[0];
    const Tensor codes = of_dtype(a, ScalarType::Char, layer.rows * layer.inner, op, "a");
    const Tensor weights =
        of_dtype(weight, ScalarType::Char, layer.outputs * layer.inner, op, "weight");
    const std::vector<int64_t> shape = {layer.rows, layer.outputs};
    SumOperands operands(a, shape, {row_scales, column_scales, row_zeros, sums, bias}, std::nullopt,
                         dtype, op);
    layer.a = static_cast<const int8_t*>(codes.data_ptr());
    layer.weight = static_cast<const int8_t*>(weights.data_ptr());
    layer.sums = operands.span;
    layer.vnni = int8_linear_is_fast();
    const int64_t panels = (layer.outputs + PANEL - 1) / PANEL;
    const int64_t parts = (layer.rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        const std::unique_ptr<char[]> scratch(
            new char[static_cast<size_t>(int8_linear_scratch(layer))]);
        for (int64_t task = begin; task < end; ++task) {
            const int64_t from = task / panels * ROWS_OF_A_TASK;
            kernel.int8_linear(layer, task % panels, from,
                               std::min(layer.rows, from + ROWS_OF_A_TASK), scratch.get());
        }
    };
    const int64_t work = std::max<int64_t>(1, layer.rows) * layer.inner * PANEL / 8;
    if (panels * parts * work <= SERIAL)
        run(0, panels * parts);
    else
        torch::stable::parallel_for(0, panels * parts, std::max<int64_t>(1, SERIAL / 2 / work),
                                    run);
    return operands.out;
}

}  // namespace

bool int8_linear_is_fast() {
    static const bool vnni = has_vnni();
    return vnni && !std::strcmp(kernels().name, "avx512");
}

}  // namespace pyops

extern "C" __attribute__((visibility("default"))) int pyops_int8_linear_is_fast() {
    return pyops::int8_linear_is_fast();
}

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "int8_linear", &pyops::int8_linear); }
