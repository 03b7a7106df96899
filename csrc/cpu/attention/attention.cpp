// Attention on tensors: checks, then blocks of queries, or tiles of keys, on torch's threads, each
// of which takes the next piece of work when it is done with one.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <tuple>

#include "../../host/box.h"
#include "attention_problem.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

constexpr int64_t TILE = ATTENTION_TILE;
constexpr int64_t MOST_QUERIES = 256;  // of a piece of work

struct Freed {
    void operator()(void* memory) const { std::free(memory); }
};

// Calls f(item, scratch) for each item, begun in their order; scratch: room for `numbers` of the
// dtype's sums, one for each thread.
template <typename F>
void for_each_item(int64_t items, int64_t numbers, int dtype, const F& f) {
    const size_t bytes = static_cast<size_t>(numbers) * (dtype == FP64 ? 8 : 4);
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t, int64_t) {
        const std::unique_ptr<void, Freed> scratch(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
        require(scratch != nullptr, "pyops: no memory for ", bytes, " bytes of attention's tiles");
        for (;;) {
            const int64_t item = next.fetch_add(1);
            if (item >= items) return;
            f(item, scratch.get());
        }
    };
    const int64_t threads =
        std::min<int64_t>(items, std::max<int64_t>(1, torch::stable::get_num_threads()));
    if (threads <= 1)
        work(0, 1);
    else
        torch::stable::parallel_for(0, threads, 1, work);
}

int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

int64_t query_block(const AttentionSpan& span) {
    int64_t block = std::min(MOST_QUERIES, up_to(span.T, TILE));
    const int64_t wanted = 4 * std::max<int64_t>(1, torch::stable::get_num_threads());
    while (block > TILE && span.B * span.H * ((span.T + block - 1) / block) < wanted)
        block = up_to(block / 2, TILE);
    return block;
}

std::tuple<Tensor, Tensor> run_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                       const AttentionOperands& operands,
                                       const AttentionNumbers& numbers) {
    AttentionProblem problem(q, k, v, operands, numbers, "attention_forward");
    AttentionSpan& span = problem.span;
    const std::vector<int64_t> shape = {span.B, span.T, span.H, span.K},
                               sums = {span.B, span.H, span.T};
    Tensor y = in_huge_pages(torch::stable::new_empty(q, shape));
    Tensor lse = torch::stable::new_empty(q, sums, wide_type(span.dtype));
    if (y.numel() == 0) return {y, lse};
    problem.find_visits(false);
    span.y = y.data_ptr();
    span.lse = lse.data_ptr();
    span.query_block = query_block(span);
    const int64_t blocks = (span.T + span.query_block - 1) / span.query_block;
    const int64_t ld = up_to(span.K, 16), rows = span.query_block;
    const Kernels& kernel = kernels();
    for_each_item(span.B * span.H * blocks, 2 * rows * ld + 3 * TILE * ld + TILE * TILE + 3 * rows,
                  span.dtype, [&](int64_t item, void* scratch) {
                      kernel.attention_forward(span, item, scratch);
                  });
    return {y, lse};
}

// Results of backward; those that are summed up in wide numbers are narrowed at the end.
struct Gradients {
    Tensor dq, dk, dv, dbias, dtable;
};

int64_t bytes_of(int dtype) { return dtype == FP64 ? 8 : dtype == FP32 ? 4 : 2; }

Tensor zeroed(Tensor out) {
    const int64_t size = bytes_of(dtype_code(out));
    char* const data = static_cast<char*>(out.data_ptr());
    for_each_part(out.numel(), [=](int64_t begin, int64_t end) {
        std::memset(data + size * begin, 0, static_cast<size_t>(size * (end - begin)));
    });
    return out;
}

Tensor zeros(const Tensor& like, const std::vector<int64_t>& shape, int dtype) {
    return zeroed(in_huge_pages(torch::stable::new_empty(like, shape, wide_type(dtype))));
}

std::vector<int64_t> shape_of(const Tensor& tensor) {
    const auto sizes = tensor.sizes();
    return {sizes.begin(), sizes.end()};
}

Tensor narrowed(const Tensor& wide, const Tensor& like, int dtype) {
    if (dtype_code(wide) == dtype) return wide;
    Tensor out = in_huge_pages(torch::stable::new_empty(like, shape_of(wide)));
    const Kernels& kernel = kernels();
    for_each_part(out.numel(), [&](int64_t begin, int64_t end) {
        kernel.scale_cast(static_cast<char*>(out.data_ptr()) + 2 * begin,
                          static_cast<const float*>(wide.data_ptr()) + begin, end - begin, dtype,
                          FP32, 1.0);
    });
    return out;
}

void check_results(const AttentionProblem& problem, const Tensor& dy, const OptionalTensor& dlse,
                   const Tensor& y, const Tensor& lse) {
    const AttentionSpan& span = problem.span;
    const int wide = span.dtype == FP64 ? FP64 : FP32;
    const auto fits = [&](const Tensor& x) {
        return dtype_code(x) == span.dtype && x.is_cpu() &&
               has_shape(x, {span.B, span.T, span.H, span.K});
    };
    const auto is_row = [&](const Tensor& x) {
        return dtype_code(x) == wide && x.is_cpu() && has_shape(x, {span.B, span.H, span.T});
    };
    require(fits(dy) && fits(y) && is_row(lse) && (!dlse || is_row(*dlse)),
            "pyops::attention_backward: dy and y must be as q, lse and dlse float32 (float64 for "
            "float64) [B, H, T]; got ",
            Shape{dy}, ", ", Shape{y}, ", ", Shape{lse});
}

// In the order of keys, so that sums over rows of the batch and pieces have one order.
void sum_table(double* parts, int64_t count, int64_t H, int64_t buckets, Tensor& dtable,
               int dtype) {
    for (int64_t i = 0; i < buckets; ++i)
        for (int64_t h = 0; h < H; ++h) {
            double sum = 0.0;
            for (int64_t n = 0; n < count; ++n) sum += parts[(n * H + h) * buckets + i];
            if (dtype == FP64)
                static_cast<double*>(dtable.data_ptr())[i * H + h] = sum;
            else
                static_cast<float*>(dtable.data_ptr())[i * H + h] = static_cast<float>(sum);
        }
}

void run_pieces(const AttentionSpan& span, const AttentionGradient& grad) {
    const Kernels& kernel = kernels();
    // A bias that several rows or heads share is added to by one piece: it goes over them all
    const bool all_rows = grad.dbias && grad.dbias_sizes[0] < span.B,
               all_heads = grad.dbias && grad.dbias_sizes[1] < span.H;
    const int64_t tiles = (span.S + TILE - 1) / TILE, rows = all_rows ? span.B : 1,
                  groups = all_heads ? span.G : 1;
    const int64_t ld = up_to(span.K, 16), parts = span.B / rows * (span.G / groups);
    // As many parts at a time as there are threads, tile by tile: pieces that are worked on at once
    // are of different heads, and none waits for its turn, where there are heads enough.
    const int64_t together =
        std::max<int64_t>(1, std::min<int64_t>(parts, torch::stable::get_num_threads()));
    for_each_item(parts * tiles, 8 * TILE * ld + 4 * TILE * TILE, span.dtype,
                  [&](int64_t item, void* scratch) {
                      const int64_t first = item / (together * tiles) * together,
                                    size = std::min(together, parts - first),
                                    within = item - first * tiles;
                      const int64_t tile = within / size, part = first + within % size;
                      const int64_t b0 = part / (span.G / groups) * rows,
                                    g0 = part % (span.G / groups) * groups;
                      for (int64_t b = b0; b < b0 + rows; ++b)
                          for (int64_t g = g0; g < g0 + groups; ++g)
                              kernel.attention_backward(span, grad, b, g, tile, scratch);
                  });
}

// What the gradient of the bias is summed or stored in.
Tensor bias_gradient(const AttentionProblem& problem, const Tensor& bias, AttentionGradient& grad) {
    const AttentionSpan& span = problem.span;
    const std::vector<int64_t> shape = shape_of(bias);
    grad.dbias_shared = shape[0] < span.B || shape[1] < span.H || shape[2] < span.T;
    Tensor dbias = grad.dbias_shared ? zeros(bias, shape, span.dtype)
                                     : in_huge_pages(torch::stable::new_empty(bias, shape));
    if (!grad.dbias_shared && !problem.visits_everywhere()) dbias = zeroed(dbias);
    grad.dbias = dbias.data_ptr();
    grad.dbias_dtype = dtype_code(dbias);
    for (int64_t d = 0; d < 3; ++d) grad.dbias_sizes[d] = shape[static_cast<size_t>(d)];
    return dbias;
}

Gradients run_backward(const Tensor& dy, const OptionalTensor& dlse, const Tensor& y,
                       const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       const AttentionOperands& operands, const AttentionNumbers& numbers,
                       bool bias_grad, bool table_grad) {
    AttentionProblem problem(q, k, v, operands, numbers, "attention_backward");
    AttentionSpan& span = problem.span;
    check_results(problem, dy, dlse, y, lse);
    const int dtype = span.dtype;
    const std::vector<int64_t> none = {0};
    Tensor dq = zeros(q, shape_of(q), dtype), dbias = torch::stable::new_empty(dy, none),
           dtable = torch::stable::new_empty(dy, none, wide_type(dtype)),
           dk = in_huge_pages(torch::stable::new_empty(k, shape_of(k))),
           dv = in_huge_pages(torch::stable::new_empty(v, shape_of(v)));
    problem.find_visits(true);
    AttentionGradient grad{};
    if (bias_grad && operands.bias) dbias = bias_gradient(problem, *operands.bias, grad);
    const int64_t tiles = (span.S + TILE - 1) / TILE;
    std::vector<double> table_parts;
    if (table_grad && operands.table) {
        dtable = torch::stable::new_empty(*operands.table, shape_of(*operands.table));
        table_parts.assign(static_cast<size_t>(span.B * tiles * span.H * problem.num_buckets), 0.0);
        grad.dtable = table_parts.data();
        grad.buckets = problem.buckets;
        grad.num_buckets = problem.num_buckets;
    }
    const Tensor own_y = dense(y), own_lse = dense(lse),
                 delta = torch::stable::new_empty(own_lse, shape_of(lse));
    OptionalTensor own_dlse;
    if (dlse) own_dlse = dense(*dlse);
    grad.dy = problem.heads_of(dy);
    grad.y = own_y.data_ptr();
    grad.delta = delta.data_ptr();
    grad.dq = dq.data_ptr();
    grad.dk = dk.data_ptr();
    grad.dv = dv.data_ptr();
    span.lse = own_lse.data_ptr();
    const Kernels& kernel = kernels();
    const void* const more = own_dlse ? own_dlse->data_ptr() : nullptr;
    if (span.B * span.T > 0)
        torch::stable::parallel_for(0, span.B * span.T, 64, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row)
                kernel.attention_delta(span, grad, more, delta.data_ptr(), row);
        });
    std::vector<int32_t> turns(static_cast<size_t>(span.B * span.H * ((span.T + TILE - 1) / TILE)),
                               0);
    grad.turns = turns.data();
    run_pieces(span, grad);
    if (grad.dtable)
        sum_table(table_parts.data(), span.B * tiles, span.H, grad.num_buckets, dtable, dtype);
    return {narrowed(dq, q, dtype), dk, dv,
            grad.dbias ? narrowed(dbias, *operands.bias, dtype_code(*operands.bias)) : dbias,
            dtable};
}

// The functions of the schema.
std::tuple<Tensor, Tensor> attention_forward(
    const Tensor q, const Tensor k, const Tensor v, const OptionalTensor bias,
    const OptionalTensor table, const OptionalTensor buckets, const OptionalTensor slopes,
    const OptionalTensor mask, const OptionalTensor query_documents,
    const OptionalTensor key_documents, const OptionalTensor query_places,
    const OptionalTensor key_places, const OptionalTensor row_counts,
    const OptionalTensor row_indices, const OptionalTensor column_counts,
    const OptionalTensor column_indices, const OptionalTensor state, double scale, double soft_cap,
    bool causal, int64_t before, int64_t after, int64_t block, double p, int64_t first,
    int64_t row_stride, int64_t num_queries, int64_t num_keys) {
    return run_forward(
        q, k, v,
        {bias, table, buckets, slopes, mask, query_documents, key_documents, query_places,
         key_places, row_counts, row_indices, column_counts, column_indices, state},
        {scale, soft_cap, causal, before, after, block, p, first, row_stride, num_queries,
         num_keys});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor dy, const OptionalTensor dlse, const Tensor y, const Tensor lse, const Tensor q,
    const Tensor k, const Tensor v, const OptionalTensor bias, const OptionalTensor table,
    const OptionalTensor buckets, const OptionalTensor slopes, const OptionalTensor mask,
    const OptionalTensor query_documents, const OptionalTensor key_documents,
    const OptionalTensor query_places, const OptionalTensor key_places,
    const OptionalTensor row_counts, const OptionalTensor row_indices,
    const OptionalTensor column_counts, const OptionalTensor column_indices,
    const OptionalTensor state, double scale, double soft_cap, bool causal, int64_t before,
    int64_t after, int64_t block, double p, int64_t first, int64_t row_stride, int64_t num_queries,
    int64_t num_keys, bool bias_grad, bool table_grad) {
    Gradients found = run_backward(
        dy, dlse, y, lse, q, k, v,
        {bias, table, buckets, slopes, mask, query_documents, key_documents, query_places,
         key_places, row_counts, row_indices, column_counts, column_indices, state},
        {scale, soft_cap, causal, before, after, block, p, first, row_stride, num_queries,
         num_keys},
        bias_grad, table_grad);
    return {found.dq, found.dk, found.dv, found.dbias, found.dtable};
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "attention_forward", &pyops::attention_forward);
    PYOPS_IMPL(m, "attention_backward", &pyops::attention_backward);
}
