// token_attention_ on tensors: checks, then groups of heads on torch's threads.
#include <algorithm>
#include <memory>

#include "../host/box.h"
#include "kernels.h"
#include "loop.h"
#include "typed_tensors.h"

namespace pyops {
namespace {

using Optional = std::optional<Tensor>;

bool is_of(const Tensor& x, std::initializer_list<int64_t> shape) {
    const auto sizes = x.sizes();
    return x.is_cpu() && dtype_code(x) == FP32 &&
           std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

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
    const int64_t rows = q.size(0), heads = q.size(2), width = q.size(3), groups = k.size(2),
                  held = keys.size(0), room = keys.size(2);
    require(is_of(q, {rows, 1, heads, width}) && is_of(k, {rows, 1, groups, width}) &&
                is_of(v, {rows, 1, groups, width}) && groups > 0 && heads % groups == 0,
            "pyops::", op,
            ": q must be float32 [R, 1, H, K], k and v [R, 1, G, K] on the CPU, H a ",
            "multiple of G; got ", Shape{q}, ", ", Shape{k}, ", ", Shape{v});
    require(is_of(keys, {held, groups, room, width}) &&
                is_of(values, {held, groups, room, width}) && keys.is_contiguous() &&
                values.is_contiguous() && first_row >= 0 && first_row <= held - rows,
            "pyops::", op, ": keys and values must be contiguous float32 [rows, ", groups,
            ", room, ", width, "] with room for ", rows, " rows from ", first_row, " on; got ",
            Shape{keys}, ", ", Shape{values});
    const Tensor where = dense(places);
    require(places.is_cpu() && places.scalar_type() == ScalarType::Long && places.numel() == rows,
            "pyops::", op, ": places must be int64 of ", rows, " numbers, got ", Shape{places});
    TokenAttention all{};
    all.places = static_cast<const int64_t*>(where.data_ptr());
    for (int64_t r = 0; r < rows; ++r)
        require(all.places[r] >= 0 && all.places[r] < room, "pyops::", op, ": place ",
                all.places[r], " is not within the room of ", room);
    require(cos.has_value() == sin.has_value(), "pyops::", op, ": cos and sin go together");
    Tensor own_q = q, own_k = k, own_v = v, own_cos = q, own_sin = q;
    if (cos) {
        own_cos = dense(*cos);
        own_sin = dense(*sin);
        all.half = rows ? own_cos.numel() / rows : 0;
        require(is_of(*cos, {rows, 1, all.half}) && is_of(*sin, {rows, 1, all.half}) &&
                    2 * all.half <= width,
                "pyops::", op, ": cos and sin must be float32 [", rows,
                ", 1, R/2] with R <= ", width, ", got ", Shape{*cos}, " and ", Shape{*sin});
        all.cos = static_cast<const float*>(own_cos.data_ptr());
        all.sin = static_cast<const float*>(own_sin.data_ptr());
    }
    const std::vector<int64_t> shape = {rows, heads * width};
    Tensor y = torch::stable::new_empty(q, shape);
    if (y.numel() == 0) return y;
    all.q = heads_of(q, own_q);
    all.k = heads_of(k, own_k);
    all.v = heads_of(v, own_v);
    const int64_t before = first_row * groups * room * width;
    all.keys = static_cast<float*>(keys.data_ptr()) + before;
    all.values = static_cast<float*>(values.data_ptr()) + before;
    all.y = static_cast<float*>(y.data_ptr());
    all.heads = heads;
    all.groups = groups;
    all.room = room;
    all.width = width;
    all.scale = scale;
    all.interleaved = interleaved;
    const int64_t most = *std::max_element(all.places, all.places + rows) + 1;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) {
        const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(width + most)]);
        kernel.token_attention(all, first, last, scratch.get());
    };
    const int64_t each = 2 * (heads / groups) * most * width;
    if (each * rows * groups <= SERIAL)
        run(0, rows * groups);
    else
        torch::stable::parallel_for(0, rows * groups, std::max<int64_t>(1, SERIAL / each), run);
    return y;
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "token_attention_", &pyops::token_attention_);
}
