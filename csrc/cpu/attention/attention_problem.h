// The tensors and numbers of the attention ops, checked, as the kernels take them.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>

#include "attention_visits.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"

namespace pyops {

using OptionalTensor = std::optional<Tensor>;

// The tensors of the schema beside q, k and v, in its order.
struct AttentionOperands {
    const OptionalTensor &bias, &table, &buckets, &slopes, &mask, &query_documents, &key_documents,
        &query_places, &key_places, &row_counts, &row_indices, &column_counts, &column_indices,
        &state;
};

// Its numbers.
struct AttentionNumbers {
    double scale, soft_cap;
    bool causal;
    int64_t before, after, block;
    double p;
    int64_t first, row_stride, num_queries, num_keys;
};

inline int32_t torch_dtype(const Tensor& tensor) {
    int32_t dtype = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    return dtype;
}

inline bool has_shape(const Tensor& tensor, std::initializer_list<int64_t> shape) {
    const auto sizes = tensor.sizes();
    return sizes.size() == shape.size() && std::equal(shape.begin(), shape.end(), sizes.begin());
}

inline torch::headeronly::ScalarType wide_type(int dtype) {
    return dtype == FP64 ? torch::headeronly::ScalarType::Double
                         : torch::headeronly::ScalarType::Float;
}

// The tensors as the kernels take them: dense where they read on without strides, kept alive here.
class AttentionProblem {
public:
    AttentionProblem(const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionOperands& given, const AttentionNumbers& numbers,
                     const char* op)
        : op_(op) {
        check_heads(q, k, v);
        span.scale = numbers.scale;
        span.soft_cap = numbers.soft_cap;
        span.causal = numbers.causal;
        span.before = numbers.before;
        span.after = numbers.after;
        require(span.soft_cap >= 0.0, "pyops::", op, ": soft_cap must be 0 or more, got ",
                span.soft_cap);
        const int64_t B = span.B, T = span.T, S = span.S;
        span.mask = data<uint8_t>(given.mask, "mask", aoti_torch_dtype_bool(), {B, S});
        span.query_documents = data<int32_t>(given.query_documents, "query_documents",
                                             aoti_torch_dtype_int32(), {B, T});
        span.key_documents =
            data<int32_t>(given.key_documents, "key_documents", aoti_torch_dtype_int32(), {B, S});
        require(!span.query_documents == !span.key_documents, "pyops::", op,
                ": documents are of queries and keys, or of neither");
        span.query_places =
            data<int64_t>(given.query_places, "query_places", aoti_torch_dtype_int64(), {T});
        span.key_places =
            data<int64_t>(given.key_places, "key_places", aoti_torch_dtype_int64(), {S});
        take_layout(given, numbers.block);
        take_bias(given.bias);
        take_distances(given);
        take_dropout(given.state, numbers);
    }

    // Which tiles meet; by tiles of keys, too, where `columns`.
    void find_visits(bool columns) {
        visits_ = std::make_unique<Visits>(span, columns);
        span.rows = visits_->rows();
        if (columns) span.columns = visits_->columns();
    }
    bool visits_everywhere() const { return visits_->everywhere(); }

    AttentionTensor heads_of(const Tensor& given) {
        kept_.push_back(given.size(3) <= 1 || given.stride(3) == 1 ? given : dense(given));
        const Tensor& x = kept_.back();
        return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
    }

    AttentionSpan span{};
    const int32_t* buckets = nullptr;
    int64_t num_buckets = 0;

private:
    void check_heads(const Tensor& q, const Tensor& k, const Tensor& v) {
        span.dtype = dtype_code(q);
        const bool four = q.dim() == 4 && k.dim() == 4 && v.dim() == 4;
        require(span.dtype >= 0 && four && dtype_code(k) == span.dtype &&
                    dtype_code(v) == span.dtype && k.is_cpu() && v.is_cpu() &&
                    q.size(0) == k.size(0) && q.size(3) == k.size(3) && k.size(2) > 0 &&
                    q.size(2) % k.size(2) == 0 &&
                    has_shape(v, {k.size(0), k.size(1), k.size(2), k.size(3)}),
                "pyops::", op_,
                ": q must be [B, T, H, K], k and v [B, S, G, K] of one dtype (float32, bfloat16, "
                "float16 or float64) and device, H a multiple of G; got ",
                Shape{q}, ", ", Shape{k}, ", ", Shape{v});
        span.B = q.size(0), span.T = q.size(1), span.H = q.size(2), span.K = q.size(3);
        span.S = k.size(1), span.G = k.size(2);
        span.q = heads_of(q);
        span.k = heads_of(k);
        span.v = heads_of(v);
    }

    template <typename T>
    const T* data(const OptionalTensor& given, const char* name, int32_t dtype,
                  std::initializer_list<int64_t> shape) {
        if (!given) return nullptr;
        require(torch_dtype(*given) == dtype && has_shape(*given, shape) && given->is_cpu(),
                "pyops::", op_, ": ", name,
                " is of another dtype, shape or device than q, k and v ask for: ", Shape{*given});
        kept_.push_back(dense(*given));
        return static_cast<const T*>(kept_.back().data_ptr());
    }

    void take_layout(const AttentionOperands& given, int64_t block) {
        span.block = given.row_counts ? block : 0;
        if (!given.row_counts) return;
        require(block >= 16 && block % 16 == 0 && given.row_indices &&
                    given.row_indices->dim() == 3 && given.row_counts->dim() == 2,
                "pyops::", op_,
                ": a layout has row_counts [heads, rows], row_indices [heads, rows, "
                "most] and a block that is a multiple of 16, got ",
                block);
        span.layout_heads = given.row_counts->size(0);
        span.query_blocks = (span.T + block - 1) / block;
        span.most = given.row_indices->size(2);
        const int32_t dtype = aoti_torch_dtype_int32();
        const int64_t heads = span.layout_heads, key_blocks = (span.S + block - 1) / block;
        require(heads == 1 || heads == span.H, "pyops::", op_, ": a layout of ", heads,
                " heads for ", span.H);
        span.row_counts =
            data<int32_t>(given.row_counts, "row_counts", dtype, {heads, span.query_blocks});
        span.row_indices = data<int32_t>(given.row_indices, "row_indices", dtype,
                                         {heads, span.query_blocks, span.most});
        for (int64_t row = 0; row < heads * span.query_blocks; ++row) {
            const int64_t count = span.row_counts[row];
            require(count >= 0 && count <= span.most, "pyops::", op_, ": row_counts holds ", count,
                    ", and row_indices have room for ", span.most);
            for (int64_t n = 0; n < count; ++n) {
                const int32_t* const list = span.row_indices + row * span.most;
                require(list[n] >= 0 && list[n] < key_blocks && (n == 0 || list[n] > list[n - 1]),
                        "pyops::", op_, ": a list of row_indices must ascend within ", key_blocks,
                        " blocks of keys, got ", list[n]);
            }
        }
    }

    void take_bias(const OptionalTensor& given) {
        if (!given) return;
        const int dtype = dtype_code(*given);
        const int64_t whole[4] = {span.B, span.H, span.T, span.S};
        bool fits = given->dim() == 4 && given->is_cpu() &&
                    (span.dtype == FP64 ? dtype == FP64 : dtype == span.dtype || dtype == FP32);
        for (int64_t d = 0; fits && d < 4; ++d)
            fits = given->size(d) == whole[d] || (d < 3 && given->size(d) == 1);
        require(fits, "pyops::", op_,
                ": bias must be [1 or B, 1 or H, 1 or T, S] of q's dtype or "
                "float32, got ",
                Shape{*given});
        const int64_t last = given->stride(3);
        kept_.push_back(span.S <= 1 || last == 1 || last == 0 ? *given : dense(*given));
        const Tensor& bias = kept_.back();
        span.bias = bias.data_ptr();
        span.bias_dtype = dtype;
        for (int64_t d = 0; d < 4; ++d)
            span.bias_stride[d] = bias.size(d) == 1 && d < 3 ? 0 : bias.stride(d);
        if (span.S <= 1) span.bias_stride[3] = 1;
    }

    void take_distances(const AttentionOperands& given) {
        const int wide = span.dtype == FP64 ? FP64 : FP32;
        if (given.slopes) {
            require(dtype_code(*given.slopes) == wide && has_shape(*given.slopes, {span.H}) &&
                        given.slopes->is_cpu(),
                    "pyops::", op_, ": slopes must be [", span.H,
                    "] of float32 (float64 for "
                    "float64), got ",
                    Shape{*given.slopes});
            kept_.push_back(dense(*given.slopes));
            span.slopes = kept_.back().data_ptr();
        }
        if (!given.table) return;
        require(given.buckets && given.buckets->dim() == 1 && given.buckets->numel() % 2 == 1 &&
                    given.table->dim() == 2 && given.table->size(1) == span.H &&
                    dtype_code(*given.table) == wide && given.table->is_cpu(),
                "pyops::", op_, ": table must be [buckets, ", span.H,
                "] of float32 (float64 for "
                "float64) and buckets int32 [2 reach + 1], got ",
                Shape{*given.table});
        const int64_t n = given.buckets->numel();
        buckets = data<int32_t>(given.buckets, "buckets", aoti_torch_dtype_int32(), {n});
        num_buckets = given.table->size(0);
        for (int64_t i = 0; i < n; ++i)
            require(buckets[i] >= 0 && buckets[i] < num_buckets, "pyops::", op_, ": buckets hold ",
                    buckets[i], ", and the table has ", num_buckets, " rows");
        span.reach = n / 2;
        kept_.push_back(dense(*given.table));
        const void* const table = kept_.back().data_ptr();
        if (wide == FP64)
            spread(static_cast<const double*>(table), wide_distances_);
        else
            spread(static_cast<const float*>(table), distances_);
    }

    // From a table of buckets to one of distances, far enough that any 64 in a row start in it.
    template <typename W>
    void spread(const W* table, std::vector<W>& out) {
        const int64_t reach = span.reach, size = 2 * (reach + ATTENTION_TILE) + 1;
        out.resize(static_cast<size_t>(span.H * size));
        for (int64_t h = 0; h < span.H; ++h)
            for (int64_t i = 0; i < size; ++i) {
                const int64_t away = std::clamp(i - reach - ATTENTION_TILE, -reach, reach);
                out[static_cast<size_t>(h * size + i)] = table[buckets[away + reach] * span.H + h];
            }
        span.by_distance = out.data();
    }

    void take_dropout(const OptionalTensor& state, const AttentionNumbers& numbers) {
        require(numbers.p >= 0.0 && numbers.p < 1.0, "pyops::", op_,
                ": p must be a probability of 0 up to but not including 1, got ", numbers.p);
        span.drops = state && numbers.p > 0.0;
        span.p = static_cast<float>(numbers.p);
        span.keep_scale = 1.0 / (1.0 - numbers.p);
        const int64_t* const words = data<int64_t>(state, "state", aoti_torch_dtype_int64(), {2});
        if (!words) return;
        require(words[1] >= 0 && numbers.first >= 0 && numbers.row_stride >= 0 &&
                    numbers.num_queries >= 0 && numbers.num_keys >= 0,
                "pyops::", op_, ": counters are 0 or more; got state[1] ", words[1], ", first ",
                numbers.first, ", row_stride ", numbers.row_stride, " and ", numbers.num_queries,
                " x ", numbers.num_keys);
        span.key = static_cast<uint64_t>(words[0]);
        span.counters = {static_cast<uint64_t>(words[1]) + static_cast<uint64_t>(numbers.first),
                         numbers.row_stride, numbers.num_queries, numbers.num_keys};
    }

    const char* op_;
    std::deque<Tensor> kept_;
    std::vector<float> distances_;
    std::vector<double> wide_distances_;
    std::unique_ptr<Visits> visits_;
};

}  // namespace pyops
