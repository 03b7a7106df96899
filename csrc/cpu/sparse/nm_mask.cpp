// N:M masks: checks, then groups on torch's threads, cut where a byte of the bits ends.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "../../host/box.h"
#include "../../math/sparse/nm_mask.h"
#include "../kernels.h"
#include "../calls/layer_tensors.h"
#include "../calls/loop.h"

namespace pyops {
namespace {

std::tuple<Tensor, Tensor> nm_mask(const Tensor given, int64_t n, int64_t m, int64_t dim) {
    require(given.is_cpu() && dtype_code(given) >= 0 && given.dim() >= 1,
            "pyops::nm_mask: w must be float32, bfloat16, float16 or float64 of one dimension or "
            "more on the CPU, got shape ",
            Shape{given});
    require(1 <= n && n <= m && m <= MOST_OF_GROUP,
            "pyops::nm_mask: n of m must be 1 <= n <= m <= ", MOST_OF_GROUP, ", got ", n, " of ",
            m);
    require(0 <= dim && dim < given.dim(), "pyops::nm_mask: dim must be 0 to ", given.dim() - 1,
            ", got ", dim);
    const Tensor w = dense(given);
    const auto sizes = w.sizes();
    require(sizes[static_cast<size_t>(dim)] % m == 0, "pyops::nm_mask: dim ", dim,
            " must be a multiple of m = ", m, ", got shape ", Shape{given});
    NMSpan span{};
    span.inner = 1;
    for (int64_t d = dim + 1; d < w.dim(); ++d) span.inner *= sizes[static_cast<size_t>(d)];
    const int64_t numel = w.numel();
    const std::vector<int64_t> bytes = {(numel + 7) / 8};
    Tensor masked = in_huge_pages(torch::stable::new_empty(w, w.sizes()));
    Tensor bits = torch::stable::new_empty(w, bytes, torch::headeronly::ScalarType::Byte);
    if (numel == 0) return {masked, bits};
    span.w = w.data_ptr();
    span.masked = masked.data_ptr();
    span.bits = static_cast<uint8_t*>(bits.data_ptr());
    span.n = static_cast<int>(n);
    span.m = static_cast<int>(m);
    span.dtype = dtype_code(w);
    const int64_t unit = m * span.inner, units = numel / unit;
    // Units of a part: they end where a byte does, and of neighbors where a register does.
    const int64_t whole = std::lcm<int64_t>(unit, CUT) / unit, parts = (units + whole - 1) / whole;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        kernel.nm_mask(span, begin * whole, std::min(units, end * whole));
    };
    if (numel <= SERIAL)
        run(0, parts);
    else
        torch::stable::parallel_for(0, parts, std::max<int64_t>(1, SERIAL / 2 / (whole * unit)),
                                    run);
    return {masked, bits};
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) { PYOPS_IMPL(m, "nm_mask", &pyops::nm_mask); }
