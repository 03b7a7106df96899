// Norms of tensors' rows: checks, then rows on torch's threads. Sums over rows go by fixed groups,
// added in their order.
#include <memory>

#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/on_threads.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

// Rows whose gradients of weight and bias are added up together, at least
constexpr int64_t GROUP = 64;
constexpr int64_t MOST_GROUPS = 128;  // and there are no more of them than this
// Elements of a result that is written past the caches, and so not fetched into them first. What
// reads it next is a matrix product, which waits for its arithmetic.
constexpr int64_t STREAMED_NUMEL = 1 << 20;

int64_t width_of(const Tensor& x, const char* op) {
    const auto sizes = x.sizes();
    require(sizes.size() > 0 && sizes[sizes.size() - 1] > 0, "pyops::", op, ": x has shape ",
            Shape{x}, "; a norm is over a last dimension of at least 1");
    return sizes[sizes.size() - 1];
}

int check_dtype(const Tensor& t, const char* name, bool float64, const char* op) {
    const int dtype = dtype_code(t);
    require(dtype >= 0 && (dtype == FP64) == float64 && t.is_cpu(), "pyops::", op, ": ", name,
            " must be a float32, bfloat16 or float16 tensor on the CPU, or float64 as all others");
    return dtype;
}

void check_same_shape(const Tensor& a, const Tensor& b, const char* name, const char* op) {
    const auto x = a.sizes(), y = b.sizes();
    require(x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin()), "pyops::", op, ": ",
            name, " has shape ", Shape{b}, " where x has ", Shape{a});
}

torch::headeronly::ScalarType scalar_type(int dtype) {
    using torch::headeronly::ScalarType;
    return dtype == FP64   ? ScalarType::Double
           : dtype == FP32 ? ScalarType::Float
           : dtype == BF16 ? ScalarType::BFloat16
                           : ScalarType::Half;
}

int64_t size_of(int dtype) { return dtype == FP64 ? 8 : dtype == FP32 ? 4 : 2; }

Tensor like(const Tensor& x, int dtype) {
    return in_huge_pages(torch::stable::new_empty(x, x.sizes(), scalar_type(dtype)));
}

Tensor statistic(const Tensor& x, bool float64) {
    const auto sizes = x.sizes();
    const std::vector<int64_t> shape(sizes.begin(), sizes.end() - 1);
    return torch::stable::new_empty(x, shape, scalar_type(float64 ? FP64 : FP32));
}

// A weight or bias as the kernels read it: contiguous fp32 (float64), with the offset added. Keeps
// what it had to make.
struct Vector {
    Optional kept;
    std::unique_ptr<char[]> made;
    const void* data = nullptr;

    Vector(const Optional& vector, const char* name, int64_t width, bool float64, double offset,
           const char* op) {
        if (!vector) return;
        const int dtype = check_dtype(*vector, name, float64, op);
        const auto sizes = vector->sizes();
        require(sizes.size() == 1 && sizes[0] == width, "pyops::", op, ": ", name,
                " must have shape [", width, "], x's last dimension, got ", Shape{*vector});
        kept = dense(*vector);
        data = kept->data_ptr();
        if ((dtype == FP32 || float64) && offset == 0.0) return;
        made.reset(new char[static_cast<size_t>(width * (float64 ? 8 : 4))]);
        kernels().scale_cast(made.get(), data, width, float64 ? FP64 : FP32, dtype, 1.0);
        if (float64)
            add(reinterpret_cast<double*>(made.get()), width, offset);
        else
            add(reinterpret_cast<float*>(made.get()), width, static_cast<float>(offset));
        data = made.get();
    }
    template <typename T>
    static void add(T* values, int64_t n, T offset) {
        for (int64_t i = 0; i < n; ++i) values[i] += offset;
    }
};

struct Forward {
    Tensor y;
    Optional sum, mean;
    Tensor rstd;
};

Forward forward(const Tensor& input, const Optional& residual, const Tensor& weight,
                const Optional& bias, double eps, double offset, bool rms, const char* op) {
    const int64_t width = width_of(input, op);
    const bool float64 = dtype_code(input) == FP64;
    NormRows rows{};
    rows.x_dtype = rows.dtype = check_dtype(input, "x", float64, op);
    Optional other;
    if (residual) {
        rows.residual_dtype = check_dtype(*residual, "residual", float64, op);
        check_same_shape(input, *residual, "residual", op);
        if (rows.residual_dtype != rows.x_dtype) rows.dtype = FP32;  // as torch promotes
        other = dense(*residual);
    }
    const Vector scale(weight, "weight", width, float64, offset, op),
        shift(bias, "bias", width, float64, 0.0, op);
    const Tensor x = dense(input);
    Forward out{like(x, rows.dtype), std::nullopt, std::nullopt, statistic(x, float64)};
    if (residual) out.sum = like(x, rows.dtype);
    if (!rms) out.mean = statistic(x, float64);
    rows.x = x.data_ptr();
    rows.residual = other ? other->data_ptr() : nullptr;
    rows.sum = out.sum ? out.sum->data_ptr() : nullptr;
    rows.y = out.y.data_ptr();
    rows.scale = scale.data;
    rows.bias = shift.data;
    rows.mean = out.mean ? out.mean->data_ptr() : nullptr;
    rows.rstd = out.rstd.data_ptr();
    rows.width = width;
    rows.eps = eps;
    rows.rms = rms;
    rows.streams = x.numel() >= STREAMED_NUMEL;
    const int64_t count = x.numel() / width;
    if (count == 0) return out;
    run_norm(rows, count);
    return out;
}

struct Backward {
    Tensor dx, dweight;
    Optional dbias;
};

// The groups' sums, [groups][2][width], to a tensor of the weight's dtype: added in their order,
// rounded once.
void add_groups(const Tensor& out, const char* sums, int64_t which, int64_t groups, int64_t width,
                bool float64) {
    const int dtype = dtype_code(out), wide = float64 ? FP64 : FP32;
    const int64_t size = float64 ? 8 : 4;
    char* const target = static_cast<char*>(out.data_ptr());
    for_each_part(width, [&](int64_t begin, int64_t end) {
        std::vector<const void*> rows;
        for (int64_t g = 0; g < groups; ++g)
            rows.push_back(sums + ((2 * g + which) * width + begin) * size);
        kernels().sum_rows(target + begin * size_of(dtype), rows.data(), static_cast<int>(groups),
                           end - begin, dtype, wide, 1.0);
    });
}

Backward backward(const Tensor& of_y, const Optional& of_sum, const Tensor& input,
                  const Tensor& weight, const Optional& mean, const Tensor& rstd, double offset,
                  bool rms, bool weight_grad, const char* op) {
    const int64_t width = width_of(input, op), count = input.numel() / width;
    const bool float64 = dtype_code(input) == FP64;
    NormGradient rows{};
    rows.dtype = check_dtype(input, "x", float64, op);
    const auto operand = [&](const Tensor& t, const char* name) {
        require(check_dtype(t, name, float64, op) == rows.dtype, "pyops::", op, ": ", name,
                " must have x's dtype");
        check_same_shape(input, t, name, op);
        return dense(t);
    };
    const auto per_row = [&](const Tensor& t, const char* name) {
        const auto own = t.sizes(), all = input.sizes();
        require(check_dtype(t, name, float64, op) == (float64 ? FP64 : FP32) &&
                    own.size() + 1 == all.size() && std::equal(own.begin(), own.end(), all.begin()),
                "pyops::", op, ": ", name,
                " must be what the forward op gave, float32 or float64 of x's shape ", Shape{input},
                " but its last dimension, got ", Shape{t});
        return dense(t);
    };
    const Tensor x = dense(input), dy = operand(of_y, "dy"), deviations = per_row(rstd, "rstd");
    const Optional dsum = of_sum ? Optional(operand(*of_sum, "dsum")) : std::nullopt;
    const Optional means = mean ? Optional(per_row(*mean, "mean")) : std::nullopt;
    const Vector scale(weight, "weight", width, float64, offset, op);
    const std::vector<int64_t> shape = {weight_grad ? width : 0};
    Backward out{like(x, rows.dtype), torch::stable::new_empty(weight, shape), std::nullopt};
    if (!rms) out.dbias = torch::stable::new_empty(weight, shape);
    rows.dy = dy.data_ptr();
    rows.dsum = dsum ? dsum->data_ptr() : nullptr;
    rows.x = x.data_ptr();
    rows.dx = out.dx.data_ptr();
    rows.scale = scale.data;
    rows.mean = means ? means->data_ptr() : nullptr;
    rows.rstd = deviations.data_ptr();
    rows.width = width;
    rows.rms = rms;
    rows.streams = x.numel() >= STREAMED_NUMEL;

    const int64_t in_group = std::max(GROUP, (count + MOST_GROUPS - 1) / MOST_GROUPS);
    const int64_t groups = std::max<int64_t>(1, (count + in_group - 1) / in_group);
    const int64_t bytes = width * (float64 ? 8 : 4);
    const std::unique_ptr<char[]> sums(new char[static_cast<size_t>(2 * groups * bytes)]);
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
            char* const here = sums.get() + 2 * g * bytes;
            memset(here, 0, static_cast<size_t>(2 * bytes));
            kernel.norm_gradient(rows, g * in_group, std::min(count, (g + 1) * in_group), here,
                                 here + bytes);
        }
    };
    if (count * width <= SERIAL)
        run(0, groups);
    else
        torch::stable::parallel_for(0, groups, 1, run);
    if (weight_grad) {
        add_groups(out.dweight, sums.get(), 0, groups, width, float64);
        if (!rms) add_groups(*out.dbias, sums.get(), 1, groups, width, float64);
    }
    return out;
}

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Three layer_norm(const Tensor x, const Tensor weight, const Optional bias, double eps) {
    const Forward out = forward(x, std::nullopt, weight, bias, eps, 0.0, false, "layer_norm");
    return {out.y, *out.mean, out.rstd};
}

Two rms_norm(const Tensor x, const Tensor weight, double eps, double offset) {
    const Forward out =
        forward(x, std::nullopt, weight, std::nullopt, eps, offset, true, "rms_norm");
    return {out.y, out.rstd};
}

Four add_layer_norm(const Tensor x, const Tensor residual, const Tensor weight, const Optional bias,
                    double eps) {
    const Forward out = forward(x, residual, weight, bias, eps, 0.0, false, "add_layer_norm");
    return {out.y, *out.sum, *out.mean, out.rstd};
}

Three add_rms_norm(const Tensor x, const Tensor residual, const Tensor weight, double eps,
                   double offset) {
    const Forward out =
        forward(x, residual, weight, std::nullopt, eps, offset, true, "add_rms_norm");
    return {out.y, *out.sum, out.rstd};
}

Three layer_norm_backward(const Tensor dy, const Optional dsum, const Tensor x, const Tensor weight,
                          const Tensor mean, const Tensor rstd, bool weight_grad) {
    const Backward out =
        backward(dy, dsum, x, weight, mean, rstd, 0.0, false, weight_grad, "layer_norm_backward");
    return {out.dx, out.dweight, *out.dbias};
}

Two rms_norm_backward(const Tensor dy, const Optional dsum, const Tensor x, const Tensor weight,
                      const Tensor rstd, double offset, bool weight_grad) {
    const Backward out = backward(dy, dsum, x, weight, std::nullopt, rstd, offset, true,
                                  weight_grad, "rms_norm_backward");
    return {out.dx, out.dweight};
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "layer_norm", &pyops::layer_norm);
    PYOPS_IMPL(m, "rms_norm", &pyops::rms_norm);
    PYOPS_IMPL(m, "add_layer_norm", &pyops::add_layer_norm);
    PYOPS_IMPL(m, "add_rms_norm", &pyops::add_rms_norm);
    PYOPS_IMPL(m, "layer_norm_backward", &pyops::layer_norm_backward);
    PYOPS_IMPL(m, "rms_norm_backward", &pyops::rms_norm_backward);
}
