// token_blocks_ on tensors: the blocks of a decoder for one new token of each row. All operands are
// checked before anything is computed; what one kernel hands to the next is memory of the call.
//
//   h, x = norm1(x + added)    y = attention of inner h    added = output y
//   h, x = norm2(x + added)    added = down activation(up h)
//
// The kernels are those of the ops that compute the parts, on the same stretches, so that the bits
// are theirs.
#include "../../host/box.h"
#include "../codes/code_product.h"
#include "kept_rows.h"
#include "../calls/names.h"
#include "../calls/on_threads.h"

namespace pyops {
namespace {

// What a number of `kinds` says of a product or a norm, pyops/ops/decoding/token_blocks.py.
constexpr int64_t BITS = 15, ZERO_POINTS = 16, WITH_BIAS = 32;
constexpr const char* OP = "token_blocks_";

// The operands of all blocks, one after the other.
class Operands {
public:
    Operands(const Tensors& tensors, const std::vector<int64_t>& kinds)
        : tensors_(tensors), kinds_(kinds) {}
    int64_t kind() { return kinds_[kind_++]; }
    const Tensor& tensor() {
        require(tensor_ < tensors_.size(), "pyops::", OP, ": the kinds name more than the ",
                tensors_.size(), " operands");
        return tensors_[tensor_++];
    }
    // fp32 of `n` numbers, contiguous.
    const float* numbers(int64_t n, const char* name) {
        const Tensor& t = tensor();
        require(is_of(t, {n}), "pyops::", OP, ": ", name, " must be float32 [", n,
                "] on the CPU, got shape ", Shape{t});
        return contiguous(t, name);
    }
    static const float* contiguous(const Tensor& t, const char* name) {
        require(t.is_contiguous(), "pyops::", OP, ": ", name, " must be contiguous, got shape ",
                Shape{t});
        return static_cast<const float*>(t.data_ptr());
    }
    bool are_used() const { return tensor_ == tensors_.size(); }

private:
    const Tensors& tensors_;
    const std::vector<int64_t>& kinds_;
    size_t tensor_ = 0, kind_ = 0;
};

// What is alike in all blocks.
struct Form {
    int64_t rows, dim, width;  // width: of a head
    double eps;
    bool rms, gated, merged;  // merged: one product makes q, k and v
    int activation;
};

struct Norm {
    const float *scale, *bias = nullptr;

    Norm(Operands& from, const Form& form) {
        const int64_t kind = from.kind();
        require(kind == 0 || (kind == WITH_BIAS && !form.rms), "pyops::", OP, ": the kind of a ",
                form.rms ? "root-mean-square norm must be 0" : "norm must be 0 or 32", ", got ",
                kind);
        scale = from.numbers(form.dim, "the weight of a norm");
        if (kind) bias = from.numbers(form.dim, "the bias of a norm");
    }
};

// The product of a few rows with the weight of a linear layer, of numbers or of codes.
class Product {
public:
    int64_t outputs;

    Product(Operands& from, int64_t rows, int64_t width, const char* name) {
        const int64_t kind = from.kind(), bits = kind & BITS;
        const Tensor& weight = from.tensor();
        if (bits) {
            const Tensor& scales = from.tensor();
            std::optional<Tensor> zeros;
            if (kind & ZERO_POINTS) zeros = from.tensor();
            coded_.emplace(weight, scales, zeros, width, bits, unit_of(bits), OP);
            codes_ = product_of(*coded_, rows, width, bits, FP32);
            outputs = coded_->rows;
        } else {
            outputs = weight.dim() == 2 ? weight.size(0) : 0;
            require(is_of(weight, {outputs, width}), "pyops::", OP, ": the weight of ", name,
                    " must be float32 [outputs, ", width, "] on the CPU, got shape ",
                    Shape{weight});
            numbers_.weight = Operands::contiguous(weight, name);
            numbers_.rows = rows;
            numbers_.width = width;
            numbers_.outputs = outputs;
            numbers_.dtype = FP32;
        }
        if (kind & WITH_BIAS) bias_ = from.numbers(outputs, "a bias");
    }

    void run(const float* x, float* y) const {
        if (coded_) {
            CodeProduct all = codes_;
            all.bias = bias_;
            all.out = y;
            run_code_product(all, x);
            return;
        }
        FewRows all = numbers_;
        all.x = x;
        all.bias = bias_;
        all.y = y;
        run_few_rows(all);
    }

private:
    std::optional<Coded> coded_;  // which keeps the codes' memory
    CodeProduct codes_{};
    FewRows numbers_{};
    const float* bias_ = nullptr;
};

struct Block {
    Norm norm1;
    std::vector<Product>
        inner;  // q k v [heads, 3, width]; or q [heads, width], k v [groups, 2, ..]
    TokenAttention attention{};
    std::vector<Product> outer;  // output, up, down
    std::optional<Norm> norm2;

    Block(Operands& from, const Form& form, const TokenPlaces& places, const Tensor& keys,
          const Tensor& values, int64_t first_row)
        : norm1(from, form) {
        for (int i = 0; i < (form.merged ? 1 : 2); ++i)
            inner.emplace_back(from, form.rows, form.dim, "queries, keys and values");
        const int64_t width = form.width, q = inner.front().outputs, kv = inner.back().outputs,
                      heads = q / ((form.merged ? 3 : 1) * width),
                      groups = form.merged ? heads : kv / (2 * width);
        require(groups > 0 && heads % groups == 0 && q == heads * width * (form.merged ? 3 : 1) &&
                    (form.merged || kv == 2 * groups * width),
                "pyops::", OP, ": ", q, " and ", kv, " outputs are no heads of width ", width);
        attention.heads = heads;
        attention.groups = groups;
        attention.width = width;
        places.tell(attention, keys, values, first_row);
        outer.emplace_back(from, form.rows, heads * width, "output");
        norm2.emplace(from, form);
        outer.emplace_back(from, form.rows, form.dim, "up");
        const int64_t hidden = outer.back().outputs;
        require(!form.gated || hidden % 2 == 0, "pyops::", OP,
                ": gate | up need an even number of outputs, got ", hidden);
        outer.emplace_back(from, form.rows, form.gated ? hidden / 2 : hidden, "down");
        for (const size_t i : {size_t{0}, size_t{2}})
            require(outer[i].outputs == form.dim, "pyops::", OP, ": ", i ? "down" : "output",
                    " must have ", form.dim, " outputs, got ", outer[i].outputs);
    }

    int64_t inner_outputs() const {
        return inner.front().outputs + (inner.size() > 1 ? inner.back().outputs : 0);
    }
};

// Memory of fp32 numbers, cut into parts.
class Scratch {
public:
    explicit Scratch(int64_t numbers) : memory_(new float[static_cast<size_t>(numbers)]) {}
    float* part(int64_t numbers) {
        float* const found = memory_.get() + used_;
        used_ += numbers;
        return found;
    }

private:
    std::unique_ptr<float[]> memory_;
    int64_t used_ = 0;
};

// The rows on their way through the blocks.
class Rows {
public:
    Rows(const float* x, const Form& form, const std::vector<Block>& blocks)
        : form_(form), x_(x), memory_(0) {
        int64_t inner = 0, heads = 0, hidden = 0;
        for (const Block& block : blocks) {
            inner = std::max(inner, block.inner_outputs());
            heads = std::max(heads, block.attention.heads * form.width);
            hidden = std::max(hidden, block.outer[1].outputs);
        }
        const int64_t rows = form.rows;
        memory_ = Scratch(rows * (3 * form.dim + 2 + inner + heads + 2 * hidden));
        sum_ = memory_.part(rows * form.dim);
        h_ = memory_.part(rows * form.dim);
        added_ = memory_.part(rows * form.dim);
        statistics_ = memory_.part(2 * rows);
        inner_ = memory_.part(rows * inner);
        y_ = memory_.part(rows * heads);
        up_ = memory_.part(rows * hidden);
        activated_ = memory_.part(rows * hidden);
        zeros_.assign(static_cast<size_t>(hidden), 0.0f);
    }

    void pass(const Block& block) {
        normalize(block.norm1);
        attend(block);
        block.outer[0].run(y_, added_);
        adds_ = true;
        normalize(*block.norm2);
        block.outer[1].run(h_, up_);
        activate(block.outer[1].outputs);
        block.outer[2].run(activated_, added_);
    }

    void finish(float* out) const {
        for (int64_t i = 0; i < form_.rows * form_.dim; ++i)
            out[i] = adds_ ? x_[i] + added_[i] : x_[i];
    }

private:
    // h = norm(x + added), and x = the sum: where x is such a sum already, in place, since each
    // number is read before its sum is written.
    void normalize(const Norm& norm) {
        NormRows all{};
        all.x = adds_ ? added_ : x_;
        all.residual = adds_ ? x_ : nullptr;
        all.sum = adds_ ? sum_ : nullptr;
        all.y = h_;
        all.scale = norm.scale;
        all.bias = norm.bias;
        all.mean = statistics_;
        all.rstd = statistics_ + form_.rows;
        all.width = form_.dim;
        all.x_dtype = all.residual_dtype = all.dtype = FP32;
        all.eps = form_.eps;
        all.rms = form_.rms;
        run_norm(all, form_.rows);
        if (adds_) x_ = sum_;
    }

    void attend(const Block& block) {
        TokenAttention all = block.attention;
        const int64_t width = form_.width, q = block.inner.front().outputs;
        block.inner.front().run(h_, inner_);
        if (form_.merged) {
            all.q = {inner_, q, 3 * width};
            all.k = {inner_ + width, q, 3 * width};
        } else {
            const int64_t kv = block.inner.back().outputs;
            float* const pairs = inner_ + form_.rows * q;
            block.inner.back().run(h_, pairs);
            all.q = {inner_, q, width};
            all.k = {pairs, kv, 2 * width};
        }
        all.v = {all.k.data + width, all.k.row, all.k.head};
        all.y = y_;
        run_token_attention(all, form_.rows);
    }

    void activate(int64_t outputs) {
        ActivationSpan span{};
        span.x = up_;
        span.out = activated_;
        span.bias = zeros_.data();
        span.columns = form_.gated ? outputs / 2 : outputs;
        span.dtype = FP32;
        span.activation = form_.activation;
        span.gated = form_.gated;
        const Kernels& kernel = kernels();
        for_each_part(form_.rows * span.columns, [&](int64_t begin, int64_t end) {
            kernel.activation_forward(span, begin, end);
        });
    }

    const Form& form_;
    const float* x_;
    bool adds_ = false;  // whether something is still to be added to x
    float *sum_, *h_, *added_, *statistics_, *inner_, *y_, *up_, *activated_;
    std::vector<float> zeros_;
    Scratch memory_;
};

Tensor token_blocks_(const Tensor given, const Tensors operands, const std::vector<int64_t> kinds,
                     const Tensors keys, const Tensors values, const Tensor places,
                     const std::optional<Tensor> cos, const std::optional<Tensor> sin,
                     int64_t first_row, int64_t width, double scale, double eps, bool rms,
                     const std::string activation, bool gated, bool interleaved) {
    const size_t count = keys.size(), each = count ? kinds.size() / count : 0;
    require(count > 0 && values.size() == count && (each == 6 || each == 7) &&
                kinds.size() == each * count,
            "pyops::", OP, ": keys and values of each block are needed, and 6 or 7 kinds; got ",
            count, ", ", values.size(), " and ", kinds.size(), " kinds");
    require(given.dim() == 2 && given.is_cpu() && dtype_code(given) == FP32 && given.size(1) > 0 &&
                width > 0,
            "pyops::", OP, ": x must be float32 [R, D] on the CPU, and heads 1 wide or wider; got ",
            Shape{given}, " and ", width);
    const Tensor x = dense(given);
    const Form form{x.size(0), x.size(1), width,     eps,
                    rms,       gated,     each == 6, activation_code(activation, OP)};
    const TokenPlaces where(places, cos, sin, form.rows, width, OP);
    Operands from(operands, kinds);
    std::vector<Block> blocks;
    blocks.reserve(count);
    for (size_t i = 0; i < count; ++i) {
        blocks.emplace_back(from, form, where, keys[i], values[i], first_row);
        blocks.back().attention.scale = scale;
        blocks.back().attention.interleaved = interleaved;
    }
    require(from.are_used(), "pyops::", OP, ": of ", operands.size(),
            " operands the kinds name only some");
    Tensor out = torch::stable::empty_like(x);
    if (form.rows == 0) return out;
    Rows rows(static_cast<const float*>(x.data_ptr()), form, blocks);
    for (const Block& block : blocks) rows.pass(block);
    rows.finish(static_cast<float*>(out.data_ptr()));
    return out;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "token_blocks_", &pyops::token_blocks_); }
