// Sums over the rows of a matrix on torch's threads, in an order that does not depend on how many
// there are: bias gradients.
//
//   rows  |--- block 0 ---|--- block 1 ---| ...  cut by the number of rows alone; a task is a
//                                                block and some columns
//   sums  [block 0, columns]                     a kernel adds 32 rows in fp32, then those to
//                                                the block's float64 sums
//         [block 1, columns]   ...               at the end the blocks are added in their order
#pragma once
#include <memory>

#include "../kernels.h"
#include "../calls/loop.h"
#include "row_tile.h"
#include "../../host/optimizers/table.h"

namespace pyops {

constexpr int64_t MOST_BLOCKS = 64;

class RowSums {
public:
    // `wanted`: whether there will be sums at all; without them the blocks only share out the work.
    RowSums(int64_t rows, int64_t columns, bool wanted) : rows_(rows), columns_(columns) {
        const int64_t units = (rows + SUM_ROWS - 1) / SUM_ROWS;
        each_ = SUM_ROWS * std::max<int64_t>(1, (units + MOST_BLOCKS - 1) / MOST_BLOCKS);
        blocks_ = (rows + each_ - 1) / each_;
        if (wanted) sums_.reset(new double[static_cast<size_t>(blocks_ * columns)]());
    }
    double* data() { return sums_.get(); }
    int64_t blocks() const { return blocks_; }
    int64_t rows_of_a_block() const { return each_; }  // the last may have fewer
    double* of_block(int64_t block) { return sums_ ? sums_.get() + block * columns_ : nullptr; }

    // Calls f(tile, block) for every task; `across` columns are walked (half of all where two go
    // together).
    template <typename F>
    void for_each_tile(int64_t across, F f) const {
        const int64_t tiles = (across + SUM_COLUMNS - 1) / SUM_COLUMNS, tasks = blocks_ * tiles;
        const auto run = [&](int64_t from, int64_t to) {
            for (int64_t task = from; task < to; ++task) {
                const int64_t block = task / tiles, begin = task % tiles * SUM_COLUMNS;
                f(RowTile{block * each_, std::min(rows_, (block + 1) * each_), begin,
                          std::min(across, begin + SUM_COLUMNS)},
                  block);
            }
        };
        if (rows_ * columns_ <= SERIAL)
            run(0, tasks);
        else
            torch::stable::parallel_for(0, tasks, 1, run);
    }

    // The blocks' sums, added in order and rounded once to `out`'s dtype.
    void finish(const Tensor& out) const {
        const int dtype = dtype_code(out);
        std::vector<double> total(static_cast<size_t>(columns_), 0.0);
        for (int64_t block = 0; block < blocks_; ++block) {
            const double* row = sums_.get() + block * columns_;
            for (int64_t j = 0; j < columns_; ++j) total[static_cast<size_t>(j)] += row[j];
        }
        if (columns_) kernels().narrow(out.data_ptr(), total.data(), columns_, dtype);
    }

private:
    int64_t rows_, columns_, each_ = 0, blocks_ = 0;
    std::unique_ptr<double[]> sums_;
};

}  // namespace pyops
