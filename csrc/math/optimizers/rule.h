// What an elementwise optimizer is: a functor of the columns of one row. The engines
// (csrc/cpu/optimizers/step_kernel.h, csrc/cuda/optimizers/step_row.cuh) load, convert, round,
// store, clip and zero around it, so a new optimizer is one header like adam.h and its
// registration.
//
//   template <typename T> struct Rule                 T: float, or a register of them
//     Options                                         from the caller, as float64; has `lr`
//     COLUMNS, WRITTEN                                columns it works on, and that it changes
//     COUNTS                                          whether each row needs its step's number
//     VARIANTS                                        how many versions are compiled
//     WITH_MAX                                        the bit of `variant` for rows that have
//                                                     a maximum; 0: never
//     Rule(options, grad_factor, step), Rule(Rule<U>) what does not depend on the element,
//                                                     rounded once to T
//     variant()                                       which version these options need
//     operator()<VARIANT>(p, g, m, v, top)            one step; columns it does not work on
//                                                     hold nothing
//
// `step` counts from 1, and is 0 where none is counted.
#pragma once
#include "../arithmetic.h"
#include "table.h"

namespace pyops {

PYOPS_HOST_DEVICE constexpr bool holds(unsigned set, Column column) {
    return (set >> column & 1u) != 0;
}

// What a row must have for a rule.
template <typename Rule>
constexpr unsigned REQUIRED = Rule::COLUMNS | (Rule::COUNTS ? set_of(STEP) : 0u);

template <int NUMBER>
struct Variant {
    static constexpr int value = NUMBER;
};

// Calls f(Variant<K>{}) with K = variant, one of 0 .. COUNT - 1.
template <int COUNT, int FIRST = 0, typename F>
PYOPS_HOST_DEVICE void with_variant(int variant, const F& f) {
    if constexpr (FIRST + 1 < COUNT) {
        if (variant != FIRST) return with_variant<COUNT, FIRST + 1>(variant, f);
    }
    f(Variant<FIRST>{});
}

}  // namespace pyops
