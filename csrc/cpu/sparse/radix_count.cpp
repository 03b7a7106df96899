// Counts of magnitudes by half of their bits, each thread in counters of its own, which are added
// afterwards: whole numbers, so the same for any number of threads. And masks applied in place.
#include <algorithm>

#include "../../host/box.h"
#include "../kernels.h"
#include "../calls/loop.h"
#include "radix_count.h"

namespace pyops {
namespace {

using Optional = std::optional<int64_t>;

constexpr int64_t PORTION = 1 << 16;        // elements that a thread counts at a time
constexpr int64_t MOST = int64_t{1} << 31;  // elements that counters of 32 bits are given

struct Portion {
    const void* data;
    int64_t n;
    int dtype;
};

// Counts portions [first, last) and adds them to `counts`.
void count(const std::vector<Portion>& portions, size_t first, size_t last, int64_t prefix,
           int64_t* counts) {
    const int64_t found = static_cast<int64_t>(last - first);
    const int64_t parts = std::min<int64_t>(found, torch::stable::get_num_threads());
    std::vector<std::vector<uint32_t>> own(static_cast<size_t>(parts));
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
            std::vector<uint32_t>& here = own[static_cast<size_t>(part)];
            here.assign(RADIX_BINS, 0);
            for (int64_t p = found * part / parts; p < found * (part + 1) / parts; ++p) {
                const Portion& portion = portions[first + static_cast<size_t>(p)];
                kernel.radix_count(portion.data, portion.n, portion.dtype, prefix, here.data());
            }
        }
    };
    if (parts <= 1)
        run(0, parts);
    else
        torch::stable::parallel_for(0, parts, 1, run);
    const int bins = prefix < 0 ? UPPER_BINS : RADIX_BINS;
    for (const std::vector<uint32_t>& here : own)
        for (int i = 0; i < RADIX_BINS; ++i) counts[i % bins] += here[static_cast<size_t>(i)];
}

void radix_count(const Tensors tensors, const Tensor counts, const Optional prefix) {
    const char* const op = "radix_count_";
    require(counts.scalar_type() == torch::headeronly::ScalarType::Long && counts.dim() == 1 &&
                counts.numel() == RADIX_BINS && is_dense(counts) && counts.is_cpu(),
            "pyops::", op, ": counts must be contiguous int64 [", RADIX_BINS,
            "] on the tensors' device, got shape ", Shape{counts});
    require(!prefix || (*prefix >= 0 && *prefix < UPPER_BINS), "pyops::", op,
            ": prefix must be None or of 0 to ", UPPER_BINS - 1, ", got ", prefix.value_or(0));
    std::vector<Portion> portions;
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor& t = tensors[i];
        const int dtype = dtype_code(t);
        require(dtype >= 0 && dtype != FP64, "pyops::", op, ": tensors[", i,
                "] must be float32, bfloat16 or float16");
        require(t.is_cpu(), "pyops::", op, ": tensors[", i,
                "] is on another device than counts; move it there");
        require(is_dense(t), "pyops::", op, ": tensors[", i, "] has shape ", Shape{t},
                ": gaps or overlaps in memory; pass a dense copy");
        const int64_t size = dtype == FP32 ? 4 : 2, n = t.numel();
        for (int64_t start = 0; start < n; start += PORTION)
            portions.push_back({static_cast<const char*>(t.data_ptr()) + start * size,
                                std::min(PORTION, n - start), dtype});
    }
    int64_t* const into = static_cast<int64_t*>(counts.data_ptr());
    const size_t most = static_cast<size_t>(MOST / PORTION);
    for (size_t first = 0; first < portions.size(); first += most)
        count(portions, first, std::min(portions.size(), first + most), prefix.value_or(-1), into);
}

void keep_bits(const Tensors tensors, const Tensors bits) {
    const char* const op = "keep_bits_";
    require(tensors.size() == bits.size(), "pyops::", op, ": ", tensors.size(), " tensors and ",
            bits.size(), " masks; pass one for each");
    for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor &t = tensors[i], &b = bits[i];
        require(dtype_code(t) >= 0 && t.is_cpu() && t.is_contiguous(), "pyops::", op, ": tensors[",
                i, "] must be contiguous float32, bfloat16, float16 or float64, got shape ",
                Shape{t});
        require(b.scalar_type() == torch::headeronly::ScalarType::Byte && b.is_cpu() &&
                    b.dim() == 1 && is_dense(b) && b.numel() == (t.numel() + 7) / 8,
                "pyops::", op, ": bits[", i, "] must be contiguous uint8 [", (t.numel() + 7) / 8,
                "] on the tensor's device, got shape ", Shape{b});
    }
    const Kernels& kernel = kernels();
    for_each_span(
        static_cast<int64_t>(tensors.size()),
        [&](int64_t row) { return tensors[static_cast<size_t>(row)].numel(); },
        [&](int64_t row, int64_t begin, int64_t end) {
            const Tensor& t = tensors[static_cast<size_t>(row)];
            const int dtype = dtype_code(t);
            const int64_t size = dtype == FP64 ? 8 : dtype == FP32 ? 4 : 2;
            kernel.keep_bits(
                static_cast<char*>(t.data_ptr()) + begin * size,
                static_cast<const uint8_t*>(bits[static_cast<size_t>(row)].data_ptr()) + begin / 8,
                end - begin, dtype);
        });
}

}  // namespace
}  // namespace pyops

STABLE_TORCH_LIBRARY_IMPL(pyops, CPU, m) {
    PYOPS_IMPL(m, "radix_count_", &pyops::radix_count);
    PYOPS_IMPL(m, "keep_bits_", &pyops::keep_bits);
}
