// Which tiles of queries and keys meet, found from a summary of each tile: nothing is looked at
// pair of tokens by pair, and what does not meet costs no more than this.
#pragma once
#include <vector>

#include "attention.h"

namespace pyops {

class Visits {
public:
    // span: what is seen, filled in; columns: whether the lists by tiles of keys are wanted.
    Visits(const AttentionSpan& span, bool columns);
    VisitLists rows() const { return lists(rows_, row_starts_, query_tiles_); }
    VisitLists columns() const { return lists(columns_, column_starts_, key_tiles_); }
    // Whether every tile of queries meets every tile of keys.
    bool everywhere() const {
        return static_cast<int64_t>(rows_.size()) == batches_ * heads_ * query_tiles_ * key_tiles_;
    }

private:
    VisitLists lists(const std::vector<Visit>& visits, const std::vector<int64_t>& starts,
                     int64_t tiles) const;
    void turn();

    int64_t batches_, heads_;  // with lists of their own; 1: the same for all
    int64_t query_tiles_, key_tiles_;
    std::vector<Visit> rows_, columns_;
    std::vector<int64_t> row_starts_, column_starts_;
};

}  // namespace pyops
