// What all sums over rows end with: float64 sums, rounded once.
#include "row_sums.h"

namespace pyops::PYOPS_ISA {

void narrow_kernel(void* out, const double* from, int64_t n, int dtype) {
    with_storage(dtype, [&](auto storage) {
        using S = typename decltype(storage)::type;
        for (int64_t i = 0; i < n; ++i)
            store(static_cast<S*>(out) + i, static_cast<Real<S>>(from[i]));
    });
}

}  // namespace pyops::PYOPS_ISA
