// A part of a matrix that one call of a kernel works on, and how a sum over rows is cut so that its
// bits depend on the matrix alone.
#pragma once
#include <cstdint>

namespace pyops {

// Rows [first, last) and columns [begin, end).
struct RowTile {
    int64_t first, last, begin, end;
};

constexpr int64_t SUM_ROWS = 32;       // rows added up in fp32 before they go into a float64 sum
constexpr int64_t SUM_COLUMNS = 2048;  // columns of a tile at most: their sums stay in L1

}  // namespace pyops
