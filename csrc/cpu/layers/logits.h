// Rows of logits and the shared vocabulary they are a part of, as the cross entropy's kernels take
// them.
//
//   columns of a row   | in the vocabulary: [0, columns) | padding |
//   column j is word first_column + j of the whole vocabulary
#pragma once
#include <cstdint>

namespace pyops {

struct LogitRows {
    const void* logits;
    int dtype;
    int64_t stride;  // between rows, in elements
    int64_t columns, padding;
    const int64_t* targets;
    int64_t ignore_index, first_column;

    // The column of a row's target, or -1 when another rank holds it.
    int64_t column_of(int64_t row) const {
        const int64_t column = targets[row] - first_column;
        return column >= 0 && column < columns ? column : -1;
    }
};

}  // namespace pyops
