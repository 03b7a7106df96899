// The last step of a row that was computed wide: an activation, and the dtype that it is stored in.
#pragma once
#include "../../math/layers/activation.h"
#include "storage.h"

#define PYOPS_INLINE __attribute__((always_inline))

namespace pyops::PYOPS_ISA {
namespace {

// `row` as it is stored, perhaps after an activation; they are the same row for fp32 and float64.
template <typename S, typename T>
void finish_row(S* out, const T* row, int64_t n, int activation) {
    const auto write = [=](auto change) {
        for_each_of<S>(n, [=](auto lane, int64_t i) PYOPS_INLINE {
            typename decltype(lane)::type a;
            load(a, row + i);
            store(out + i, change(a));
        });
    };
    if (activation >= 0)
        with_activation<(sizeof(S) > 2)>(activation, [&](auto act) {
            write([act](auto z) PYOPS_INLINE {
                decltype(z) value, slope;
                act(z, value, slope);
                return value;
            });
        });
    else if constexpr (sizeof(S) != sizeof(T))
        write([](auto z) PYOPS_INLINE { return z; });
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
