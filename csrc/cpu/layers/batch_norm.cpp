// Batch norm of a matrix of pixels and channels: checks, then rows on torch's threads. Sums go by
// blocks of rows, which depend on the shape alone, and the blocks in their order.
#include <cmath>
#include <memory>

#include "../../host/box.h"
#include "../../math/layers/batch_norm.h"
#include "../calls/layer_tensors.h"
#include "../calls/names.h"
#include "../rows/row_blocks.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

struct Matrix {
    Tensor x;
    ChannelRows rows{};
    int64_t pixels = 0;
    bool float64;

    Matrix(const Tensor& given, const char* op) : x(dense(given)) {
        rows.dtype = dtype_code(given);
        require(rows.dtype >= 0 && given.dim() > 0 && given.is_cpu(), "pyops::", op,
                ": x must be float32, bfloat16, float16 or float64 [..., C] on the CPU, got shape ",
                Shape{given});
        float64 = rows.dtype == FP64;
        rows.channels = given.sizes()[static_cast<size_t>(given.dim() - 1)];
        pixels = rows.channels ? given.numel() / rows.channels : 0;
        rows.x = x.data_ptr();
        rows.activation = -1;
    }
    // float64 [channels], or [2, channels], of what the ops before gave
    const double* statistic(const Tensor& t, const char* name, int64_t vectors,
                            const char* op) const {
        const auto sizes = t.sizes();
        const int64_t dim = vectors == 1 ? 1 : 2;
        require(dtype_code(t) == FP64 && t.is_cpu() && t.dim() == dim && t.is_contiguous() &&
                    sizes[static_cast<size_t>(dim - 1)] == rows.channels &&
                    (dim == 1 || sizes[0] == vectors),
                "pyops::", op, ": ", name, " must be contiguous float64 of ", vectors, " x ",
                rows.channels, " numbers on the CPU, got shape ", Shape{t});
        return static_cast<const double*>(t.data_ptr());
    }
    void of_gradient(const Tensor& dy, const char* op) {
        const auto own = dy.sizes(), all = x.sizes();
        require(dtype_code(dy) == rows.dtype && dy.is_cpu() && own.size() == all.size() &&
                    std::equal(own.begin(), own.end(), all.begin()),
                "pyops::", op, ": dy must be of x's dtype and shape ", Shape{x}, ", got ",
                Shape{dy});
    }
    // A weight or bias in float64, or none.
    std::vector<double> vector(const Optional& t, const char* name, const char* op) const {
        if (!t) return {};
        const int dtype = dtype_code(*t);
        require(dtype >= 0 && (dtype == FP64) == float64 && t->is_cpu() && t->dim() == 1 &&
                    t->numel() == rows.channels,
                "pyops::", op, ": ", name, " must be [", rows.channels,
                "] of float32, bfloat16 or float16, or float64 as x; got shape ", Shape{*t});
        const Tensor flat = dense(*t);
        std::vector<double> out(static_cast<size_t>(rows.channels));
        if (out.empty()) return out;
        if (float64) {
            memcpy(out.data(), flat.data_ptr(), out.size() * sizeof(double));
            return out;
        }
        std::vector<float> single(out.size());
        kernels().scale_cast(single.data(), flat.data_ptr(), rows.channels, FP32, dtype, 1.0);
        std::copy(single.begin(), single.end(), out.begin());
        return out;
    }
    template <typename F>
    void over_rows(const F& run) const {
        if (x.numel() <= SERIAL)
            run(0, pixels);
        else
            torch::stable::parallel_for(0, pixels, std::max<int64_t>(1, SERIAL / 2 / rows.channels),
                                        run);
    }
};

// Numbers of each channel as the kernels read them: fp32, or float64 for float64.
class ChannelVector {
public:
    ChannelVector(int64_t channels, bool float64)
        : float64_(float64), wide_(static_cast<size_t>(float64 ? channels : 0)),
          narrow_(static_cast<size_t>(float64 ? 0 : channels)) {}
    void set(int64_t c, double value) {
        if (float64_)
            wide_[static_cast<size_t>(c)] = value;
        else
            narrow_[static_cast<size_t>(c)] = static_cast<float>(value);
    }
    double get(int64_t c) const {
        return float64_ ? wide_[static_cast<size_t>(c)]
                        : static_cast<double>(narrow_[static_cast<size_t>(c)]);
    }
    const void* data() const {
        return float64_ ? static_cast<const void*>(wide_.data()) : narrow_.data();
    }

private:
    bool float64_;
    std::vector<double> wide_;
    std::vector<float> narrow_;
};

Tensor doubles(const Tensor& like, int64_t vectors, int64_t channels) {
    const std::vector<int64_t> shape = {vectors, channels};
    return torch::stable::new_empty(like, shape, torch::headeronly::ScalarType::Double);
}

Tensor batch_norm_moments(const Tensor given) {
    const Matrix m(given, "batch_norm_moments");
    const int64_t C = m.rows.channels;
    Tensor out = doubles(m.x, 2, C);
    double* const mean = static_cast<double*>(out.data_ptr());
    std::fill(mean, mean + 2 * C, 0.0);
    const RowSums parts(m.pixels, C, false);
    std::vector<double> found(static_cast<size_t>(parts.blocks() * 2 * C));
    const Kernels& kernel = kernels();
    parts.for_each_tile(C, [&](const RowTile& tile, int64_t block) {
        double* const here = found.data() + block * 2 * C;
        kernel.channel_moments(m.rows, tile, here, here + C);
    });
    for (int64_t block = 0; block < parts.blocks(); ++block) {
        const double* const here = found.data() + block * 2 * C;
        const int64_t before = block * parts.rows_of_a_block();
        const MomentsMerge merge(
            static_cast<double>(before),
            static_cast<double>(std::min(m.pixels - before, parts.rows_of_a_block())));
        for (int64_t c = 0; c < C; ++c) merge(mean[c], mean[C + c], here[c], here[C + c]);
    }
    return out;
}

Tensor batch_norm_apply(const Tensor given, const Tensor mean, const Tensor rstd,
                        const Optional weight, const Optional bias,
                        const std::optional<std::string> activation) {
    const char* const op = "batch_norm_apply";
    Matrix m(given, op);
    const int64_t C = m.rows.channels;
    const double *const means = m.statistic(mean, "mean", 1, op), *const deviations = m.statistic(
                                                                      rstd, "rstd", 1, op);
    const std::vector<double> gamma = m.vector(weight, "weight", op),
                              beta = m.vector(bias, "bias", op);
    if (activation) m.rows.activation = activation_code(*activation, op);
    ChannelVector centre(C, m.float64), scale(C, m.float64), shift(C, m.float64);
    for (int64_t c = 0; c < C; ++c) {
        const size_t k = static_cast<size_t>(c);
        const double factor = deviations[c] * (gamma.empty() ? 1.0 : gamma[k]);
        centre.set(c, means[c]);
        scale.set(c, factor);
        shift.set(c, (beta.empty() ? 0.0 : beta[k]) + (centre.get(c) - means[c]) * factor);
    }
    Tensor y = in_huge_pages(torch::stable::new_empty(m.x, m.x.sizes()));
    m.rows.out = y.data_ptr();
    m.rows.centre = centre.data();
    m.rows.scale = scale.data();
    m.rows.shift = shift.data();
    const Kernels& kernel = kernels();
    m.over_rows([&](int64_t begin, int64_t end) { kernel.channel_rows(m.rows, begin, end); });
    return y;
}

Tensor batch_norm_sums(const Tensor given, const Tensor x, const Tensor mean) {
    const char* const op = "batch_norm_sums";
    Matrix m(x, op);
    m.of_gradient(given, op);
    const int64_t C = m.rows.channels;
    const double* const means = m.statistic(mean, "mean", 1, op);
    const Tensor dy = dense(given);
    ChannelVector centre(C, m.float64);
    for (int64_t c = 0; c < C; ++c) centre.set(c, means[c]);
    m.rows.dy = dy.data_ptr();
    m.rows.centre = centre.data();
    Tensor out = doubles(m.x, 2, C);
    double* const sums = static_cast<double*>(out.data_ptr());
    RowSums parts(m.pixels, 2 * C, true);
    const Kernels& kernel = kernels();
    parts.for_each_tile(C, [&](const RowTile& tile, int64_t block) {
        kernel.channel_sums(m.rows, tile, parts.of_block(block));
    });
    parts.finish(out);
    for (int64_t c = 0; c < C; ++c) sums[C + c] += (centre.get(c) - means[c]) * sums[c];
    return out;
}

Tensor batch_norm_input_grad(const Tensor given, const Tensor x, const Tensor mean,
                             const Tensor rstd, const Optional weight, const Tensor sums,
                             double count) {
    const char* const op = "batch_norm_input_grad";
    Matrix m(x, op);
    m.of_gradient(given, op);
    const int64_t C = m.rows.channels;
    const double *const means = m.statistic(mean, "mean", 1, op),
                        *const deviations = m.statistic(rstd, "rstd", 1, op),
                        *const all = m.statistic(sums, "sums", 2, op);
    const std::vector<double> gamma = m.vector(weight, "weight", op);
    const Tensor dy = dense(given);
    ChannelVector centre(C, m.float64), scale(C, m.float64), slope(C, m.float64),
        shift(C, m.float64);
    for (int64_t c = 0; c < C; ++c) {
        const double r = deviations[c];
        const double factor = r * (gamma.empty() ? 1.0 : gamma[static_cast<size_t>(c)]);
        centre.set(c, means[c]);
        scale.set(c, factor);
        slope.set(c, -factor * r * r * all[C + c] / count);
        shift.set(c, -factor * all[c] / count + slope.get(c) * (centre.get(c) - means[c]));
    }
    Tensor dx = in_huge_pages(torch::stable::new_empty(m.x, m.x.sizes()));
    m.rows.dy = dy.data_ptr();
    m.rows.out = dx.data_ptr();
    m.rows.centre = centre.data();
    m.rows.scale = scale.data();
    m.rows.slope = slope.data();
    m.rows.shift = shift.data();
    const Kernels& kernel = kernels();
    if (m.x.numel())
        m.over_rows([&](int64_t begin, int64_t end) { kernel.channel_rows(m.rows, begin, end); });
    return dx;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "batch_norm_moments", &pyops::batch_norm_moments);
    PYOPS_IMPL(m, "batch_norm_apply", &pyops::batch_norm_apply);
    PYOPS_IMPL(m, "batch_norm_sums", &pyops::batch_norm_sums);
    PYOPS_IMPL(m, "batch_norm_input_grad", &pyops::batch_norm_input_grad);
}
