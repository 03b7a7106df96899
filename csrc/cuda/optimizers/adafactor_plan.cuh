// Adafactor's tensors cut into tiles: where each tensor's tiles, means and sums begin. Arithmetic
// of the host alone, so that a test without a GPU has the same plan.
//
//   matrix   |-- 256 columns --|-- 256 --|-- rest --|     tiles of 128 rows, in the order of
//            |                 |         |          |     matrices, rows, columns
//   vector   rows of 256 numbers, the last one shorter
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "../../math/optimizers/table.h"
#include "../partition.cuh"

namespace pyops::cuda {

constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256;
// What a CTA takes at a time where sums become means: rows, one a thread, or columns of a matrix.
constexpr int MEAN_ROWS = 256, MEAN_COLUMNS = 32;

// A second row of a tensor's table.
enum FactorColumn : int {
    MATRICES,
    HEIGHT,  // rows of a matrix
    WIDTH,   // columns
    ROW_VAR,
    COL_VAR,
    VARIANCE,  // of a vector; 0: a matrix
    FIRST_TILE,
    FIRST_MEAN,    // CTAs' turns where sums become means
    FIRST_MATRIX,  // of all tensors'
    ROW_SUMS,      // float64 [matrices, tiles across, rows]
    COLUMN_SUMS,   // float64 [matrices, tiles down, columns]
    LEAST,         // the least root: the bits of a float64
    FACTOR_COLUMNS
};
static_assert(static_cast<int>(FACTOR_COLUMNS) == static_cast<int>(COLUMNS),
              "the two kinds of rows travel together");

PYOPS_EVERYWHERE int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

// CTAs' turns of one matrix where sums become means.
PYOPS_EVERYWHERE int64_t means_of(int64_t height, int64_t width) {
    return parts_of(height, MEAN_ROWS) + parts_of(width, MEAN_COLUMNS);
}

struct AdafactorPlan {
    std::vector<int64_t> rows;  // FACTOR_COLUMNS of each tensor
    int64_t tensors = 0, tiles = 0, means = 0, matrices = 0, row_sums = 0, column_sums = 0;

    // A tensor of [matrices, height, width], or a vector of `width` numbers with its `variance`.
    void add(int64_t count, int64_t height, int64_t width, const float* row_var,
             const float* col_var, const float* variance, double least) {
        if (variance) {
            count = width > 0;
            height = parts_of(width, TILE_COLUMNS);
            width = TILE_COLUMNS;
        }
        int64_t least_bits;
        memcpy(&least_bits, &least, sizeof least);
        const auto address = [](const float* at) { return reinterpret_cast<int64_t>(at); };
        const int64_t row[FACTOR_COLUMNS] = {
            count, height, width,    address(row_var), address(col_var), address(variance),
            tiles, means,  matrices, row_sums,         column_sums,      least_bits};
        rows.insert(rows.end(), row, row + FACTOR_COLUMNS);
        const int64_t down = parts_of(height, TILE_ROWS), across = parts_of(width, TILE_COLUMNS);
        ++tensors;
        tiles += count * down * across;
        matrices += count;
        if (variance) return;
        means += count * means_of(height, width);
        row_sums += count * across * height;
        column_sums += count * down * width;
    }

    // float64 numbers that the kernels need beside the tensors.
    int64_t workspace() const {
        return row_sums + column_sums + 2 * tiles + matrices + 2 * tensors;
    }
};

}  // namespace pyops::cuda
