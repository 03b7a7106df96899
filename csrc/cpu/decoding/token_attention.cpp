// token_attention_ on tensors: checks, then groups of heads on torch's threads.
#include "../../host/box.h"
#include "kept_rows.h"
#include "../calls/on_threads.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

// x [rows, 1, heads, width]; `kept` is where it lives if it had to be copied.
TokenHeads heads_of(const Tensor& x, Tensor& kept) {
    kept = x.size(3) <= 1 || x.stride(3) == 1 ? x : dense(x);
    return {static_cast<const float*>(kept.data_ptr()), kept.stride(0), kept.stride(2)};
}

Tensor token_attention_(const Tensor q, const Tensor k, const Tensor v, Tensor keys, Tensor values,
                        const Tensor places, const Optional cos, const Optional sin,
                        int64_t first_row, double scale, bool interleaved) {
    const char* const op = "token_attention_";
    const bool four = q.dim() == 4 && k.dim() == 4 && keys.dim() == 4;
    require(four, "pyops::", op, ": q, k, keys must have 4 dimensions, got ", Shape{q}, ", ",
            Shape{k}, ", ", Shape{keys});
    const int64_t rows = q.size(0), heads = q.size(2), width = q.size(3), groups = k.size(2);
    require(is_of(q, {rows, 1, heads, width}) && is_of(k, {rows, 1, groups, width}) &&
                is_of(v, {rows, 1, groups, width}) && groups > 0 && heads % groups == 0,
            "pyops::", op,
            ": q must be float32 [R, 1, H, K], k and v [R, 1, G, K] on the CPU, H a ",
            "multiple of G; got ", Shape{q}, ", ", Shape{k}, ", ", Shape{v});
    TokenAttention all{};
    all.heads = heads;
    all.groups = groups;
    all.width = width;
    all.scale = scale;
    all.interleaved = interleaved;
    const TokenPlaces where(places, cos, sin, rows, width, op);
    where.tell(all, keys, values, first_row);
    const std::vector<int64_t> shape = {rows, heads * width};
    Tensor y = torch::stable::new_empty(q, shape);
    if (y.numel() == 0) return y;
    Tensor own_q = q, own_k = k, own_v = v;
    all.q = heads_of(q, own_q);
    all.k = heads_of(k, own_k);
    all.v = heads_of(v, own_v);
    all.y = static_cast<float*>(y.data_ptr());
    run_token_attention(all, rows);
    return y;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "token_attention_", &pyops::token_attention_);
}
