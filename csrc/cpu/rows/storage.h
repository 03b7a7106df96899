// Numbers of any of the four dtypes in memory, and what they are computed in: registers of fp32, or
// float64 one by one.
#pragma once
#include "vector.h"

namespace pyops::PYOPS_ISA {
namespace {

// The number a stored one is computed in, and for_each number by number where that is float64.
template <typename S>
struct Computed {
    using type = float;
};
template <>
struct Computed<double> {
    using type = double;
};
template <typename S>
using Real = typename Computed<S>::type;

inline void load(double& out, const double* p) { out = *p; }
inline void store(double* p, double a) { *p = a; }

template <typename S, typename F>
inline __attribute__((always_inline)) void for_each_of(int64_t n, const F& f) {
    if constexpr (sizeof(S) == 8) {
        PYOPS_VECTORISE
        for (int64_t i = 0; i < n; ++i) f(Lane<double>{}, i);
    } else {
        for_each(n, f);
    }
}

// Calls f(Lane<S>{}) with the type S of a dtype's numbers in memory.
template <typename F>
inline __attribute__((always_inline)) void with_storage(int dtype, const F& f) {
    if (dtype == FP32)
        f(Lane<float>{});
    else if (dtype == BF16)
        f(Lane<Bf16>{});
    else if (dtype == FP16)
        f(Lane<Fp16>{});
    else
        f(Lane<double>{});
}

}  // namespace
}  // namespace pyops::PYOPS_ISA
