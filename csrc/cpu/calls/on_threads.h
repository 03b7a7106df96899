// Kernels of a few rows on torch's threads: how much each thread gets, and its scratch memory. What
// they are told has been checked before.
#pragma once
#include <algorithm>
#include <memory>

#include "../kernels.h"
#include "loop.h"

namespace pyops {

// All outputs of the product of a few rows with a matrix.
inline void run_few_rows(const FewRows& all) {
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t begin, int64_t end) { kernel.few_rows(all, begin, end); };
    if (all.width * all.outputs <= SERIAL)
        run(0, all.outputs);
    else
        torch::stable::parallel_for(0, all.outputs, std::max<int64_t>(8, SERIAL / 2 / all.width),
                                    run);
}

// `count` rows of a norm.
inline void run_norm(const NormRows& rows, int64_t count) {
    const Kernels& kernel = kernels();
    const int64_t bytes = 2 * rows.width * (rows.dtype == FP64 ? 8 : 4);
    const auto run = [&](int64_t begin, int64_t end) {
        const std::unique_ptr<char[]> scratch(new char[static_cast<size_t>(bytes)]);
        kernel.norm_rows(rows, begin, end, scratch.get());
    };
    if (count * rows.width <= SERIAL)
        run(0, count);
    else
        torch::stable::parallel_for(0, count, std::max<int64_t>(1, SERIAL / 2 / rows.width), run);
}

// All heads of `rows` rows, one or more.
inline void run_token_attention(const TokenAttention& all, int64_t rows) {
    const int64_t most = *std::max_element(all.places, all.places + rows) + 1;
    const Kernels& kernel = kernels();
    const auto run = [&](int64_t first, int64_t last) {
        const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(all.width + most)]);
        kernel.token_attention(all, first, last, scratch.get());
    };
    const int64_t each = 2 * (all.heads / all.groups) * most * all.width;
    if (each * rows * all.groups <= SERIAL)
        run(0, rows * all.groups);
    else
        torch::stable::parallel_for(0, rows * all.groups, std::max<int64_t>(1, SERIAL / each), run);
}

}  // namespace pyops
