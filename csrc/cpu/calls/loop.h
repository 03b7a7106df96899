// How the CPU kernels share work among torch's threads: one parallel region for a whole list, cut
// into equal parts of its sum.
//
//   rows   |----|--|---------------------|-|---|
//   parts  |..........|..........|..........|..|  each a few rows, the first and last perhaps cut
#pragma once
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>

namespace pyops {

// Work, in elements, below which waking threads costs more than it saves
constexpr int64_t SERIAL = 32768;
constexpr int64_t ROW_COST = 64;  // what a row costs beside its elements, in elements
// A row is cut at multiples of this, so that no two threads write one cache line
constexpr int64_t CUT = 64;

// Calls f(row, begin, end) so that every row [0, size(row)) is covered once. Rows must not depend
// on each other.
template <typename Size, typename F>
void for_each_span(int64_t rows, Size size, F f) {
    int64_t work = 0;
    for (int64_t row = 0; row < rows; ++row) work += size(row) + ROW_COST;
    const int64_t parts =
        work <= SERIAL ? 1 : std::max<int64_t>(1, torch::stable::get_num_threads());
    const auto run = [&](int64_t first_part, int64_t last_part) {
        const int64_t from = work / parts * first_part;
        const int64_t to = last_part == parts ? work : work / parts * last_part;
        int64_t start = 0;  // of the row, on the running sum
        for (int64_t row = 0; row < rows && start < to; ++row) {
            const int64_t n = size(row);
            const auto position = [&](int64_t point) {  // of a cut, within the row
                const int64_t p = point - start;
                return p <= 0 ? int64_t{0} : p >= n ? n : p / CUT * CUT;
            };
            const int64_t begin = position(from), end = position(to);
            if (begin < end) f(row, begin, end);
            start += n + ROW_COST;
        }
    };
    if (parts == 1)
        run(0, 1);
    else
        torch::stable::parallel_for(0, parts, 1, run);
}

// Calls f(begin, end) on parts of [0, n) cut at multiples of CUT.
template <typename F>
void for_each_part(int64_t n, F f) {
    for_each_span(
        1, [=](int64_t) { return n; }, [&](int64_t, int64_t begin, int64_t end) { f(begin, end); });
}

}  // namespace pyops
