// A row of scores to weights of a softmax.
#pragma once
#include "../../math/attention/attention.h"
#include "rows.h"

namespace pyops::PYOPS_ISA {
namespace {

// x = exp(x - shift).
template <typename W>
void weights_of(W* x, W shift, int64_t n) {
    for_each_of<W>(n, [=](auto lane, int64_t i) __attribute__((always_inline)) {
        using V = typename decltype(lane)::type;
        V s;
        load(s, x + i);
        store(x + i, softmax_exponential(s - V(shift)));
    });
}

// The same; the sum of all.
template <typename W>
W exponentials(W* x, int64_t n, W shift) {
    weights_of(x, shift, n);
    Sums<W> sum;
    across<W>(n, [&](auto lane, int64_t i, int slot) __attribute__((always_inline)) {
        typename decltype(lane)::type e;
        load(e, x + i);
        sum.add(e, slot);
    });
    return sum.total();
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
