// What attention of one new token a row is told of what is kept, checked: keys and values, where
// each row's token stands, and by which angles it is turned.
#pragma once
#include "../kernels.h"
#include "../calls/typed_tensors.h"

namespace pyops {

// Whether x is fp32 of this shape in the CPU's memory.
inline bool is_of(const Tensor& x, std::initializer_list<int64_t> shape) {
    const auto sizes = x.sizes();
    return x.is_cpu() && dtype_code(x) == FP32 &&
           std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end());
}

// Places and angles of the new tokens of `rows` rows.
class TokenPlaces {
public:
    TokenPlaces(const Tensor& places, const std::optional<Tensor>& cos,
                const std::optional<Tensor>& sin, int64_t rows, int64_t width, const char* op)
        : rows_(rows), op_(op), places_(dense(places)) {
        require(
            places.is_cpu() && places.scalar_type() == ScalarType::Long && places.numel() == rows,
            "pyops::", op, ": places must be int64 of ", rows, " numbers, got ", Shape{places});
        require(cos.has_value() == sin.has_value(), "pyops::", op, ": cos and sin go together");
        if (!cos) return;
        cos_ = dense(*cos);
        sin_ = dense(*sin);
        half_ = cos->dim() == 3 ? cos->size(2) : 0;
        require(
            is_of(*cos, {rows, 1, half_}) && is_of(*sin, {rows, 1, half_}) && 2 * half_ <= width,
            "pyops::", op, ": cos and sin must be float32 [", rows, ", 1, R/2] with R <= ", width,
            ", got ", Shape{*cos}, " and ", Shape{*sin});
    }

    // Tells `all` of them, and of the rows from first_row on of keys and values [held, groups,
    // room, width]; its groups and width are set.
    void tell(TokenAttention& all, const Tensor& keys, const Tensor& values,
              int64_t first_row) const {
        const int64_t held = keys.dim() == 4 ? keys.size(0) : 0,
                      room = keys.dim() == 4 ? keys.size(2) : 0;
        require(is_of(keys, {held, all.groups, room, all.width}) &&
                    is_of(values, {held, all.groups, room, all.width}) && keys.is_contiguous() &&
                    values.is_contiguous() && first_row >= 0 && first_row <= held - rows_,
                "pyops::", op_, ": keys and values must be contiguous float32 [rows, ", all.groups,
                ", room, ", all.width, "] with room for ", rows_, " rows from ", first_row,
                " on; got ", Shape{keys}, ", ", Shape{values});
        all.places = static_cast<const int64_t*>(places_.data_ptr());
        for (int64_t r = 0; r < rows_; ++r)
            require(all.places[r] >= 0 && all.places[r] < room, "pyops::", op_, ": place ",
                    all.places[r], " is not within the room of ", room);
        if (cos_) {
            all.half = half_;
            all.cos = static_cast<const float*>(cos_->data_ptr());
            all.sin = static_cast<const float*>(sin_->data_ptr());
        }
        const int64_t before = first_row * all.groups * room * all.width;
        all.keys = static_cast<float*>(keys.data_ptr()) + before;
        all.values = static_cast<float*>(values.data_ptr()) + before;
        all.room = room;
    }

private:
    int64_t rows_, half_ = 0;
    const char* op_;
    Tensor places_;
    std::optional<Tensor> cos_, sin_;
};

}  // namespace pyops
