// BlockLists: the blocks that a list of rectangles visits, by rows and by columns, each once and
// ascending; under pyops.ops.attention.BlockLayout.
//
//   rectangles of blocks            a strip of 64 rows as bits        lists of the rows, from which
//   (head, row, row end,     -->    . x x . . x .  row 0       -->    those of the columns follow:
//    column, column end)            . . x x . . .  row 1              rows come in their order
//
// A strip is painted by the rectangles that reach into it alone, and of a row only the words
// between its first and last painted one are read: memory and time are those of what is visited,
// and of one strip.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../cpu/calls/huge_pages.h"

namespace py = pybind11;

namespace {

constexpr int64_t STRIP = 64;  // rows
constexpr int64_t WORD = 64;   // bits

struct Rectangle {  // as the rows of the tensor lie in memory
    int64_t head, row, row_end, column, column_end;
};

// A strip of one head as bits.
class Strip {
public:
    explicit Strip(int64_t columns)
        : words_((columns + WORD - 1) / WORD), bits_(static_cast<size_t>(STRIP * words_), 0),
          first_(STRIP, words_), end_(STRIP, 0) {}

    void paint(int64_t row, int64_t column, int64_t column_end) {
        if (column >= column_end) return;
        const int64_t first = column / WORD, last = (column_end - 1) / WORD;
        const uint64_t from = ~uint64_t{0} << (column % WORD),
                       to = ~uint64_t{0} >> (WORD - 1 - (column_end - 1) % WORD);
        uint64_t* const bits = bits_.data() + row * words_;
        if (first == last) {
            bits[first] |= from & to;
        } else {
            bits[first] |= from;
            for (int64_t w = first + 1; w < last; ++w) bits[w] = ~uint64_t{0};
            bits[last] |= to;
        }
        int64_t &begin = first_[static_cast<size_t>(row)], &end = end_[static_cast<size_t>(row)];
        begin = std::min(begin, first);
        end = std::max(end, last + 1);
    }

    // Calls f(column) for each painted column of the row, ascending, and clears the row.
    template <typename F>
    void take(int64_t row, const F& f) {
        int64_t &begin = first_[static_cast<size_t>(row)], &end = end_[static_cast<size_t>(row)];
        uint64_t* const bits = bits_.data() + row * words_;
        for (int64_t w = begin; w < end; ++w) {
            for (uint64_t word = bits[w]; word; word &= word - 1)
                f(static_cast<int32_t>(w * WORD + __builtin_ctzll(word)));
            bits[w] = 0;
        }
        begin = words_;
        end = 0;
    }

private:
    int64_t words_;
    std::vector<uint64_t> bits_;
    std::vector<int64_t> first_, end_;  // painted words of each row
};

// Where the tables of one direction are: int32 [lines], int32 and bool [lines, most].
struct Tables {
    int32_t* counts;
    int32_t* indices;
    bool* full;
};

Tables tables_at(uintptr_t counts, uintptr_t indices, uintptr_t full) {
    return {reinterpret_cast<int32_t*>(counts), reinterpret_cast<int32_t*>(indices),
            reinterpret_cast<bool*>(full)};
}

class BlockLists {
public:
    // The rectangles lie within heads x rows x columns; where causal, no row visits a later column.
    BlockLists(uintptr_t rectangles, int64_t count, int64_t heads, int64_t rows, int64_t columns,
               bool causal)
        : heads_(heads), rows_(rows), columns_(columns), causal_(causal),
          column_counts_(static_cast<size_t>(heads * columns), 0) {
        const py::gil_scoped_release released;
        const int64_t strips = (rows + STRIP - 1) / STRIP;
        const Rectangle* const given = reinterpret_cast<const Rectangle*>(rectangles);
        // In the order of the strips they begin in
        std::vector<int64_t> starts(static_cast<size_t>(heads * strips + 1), 0);
        const auto begins = [&](const Rectangle& r) {
            return static_cast<size_t>(r.head * strips + r.row / STRIP);
        };
        const auto is_empty = [](const Rectangle& r) {
            return r.row >= r.row_end || r.column >= r.column_end;
        };
        for (int64_t n = 0; n < count; ++n)
            if (!is_empty(given[n])) ++starts[begins(given[n]) + 1];
        for (size_t n = 1; n < starts.size(); ++n) starts[n] += starts[n - 1];
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        std::vector<Rectangle> ordered(static_cast<size_t>(starts.back()));
        for (int64_t n = 0; n < count; ++n)
            if (!is_empty(given[n]))
                ordered[static_cast<size_t>(next[begins(given[n])]++)] = given[n];
        find(ordered, starts, strips);
    }

    int64_t most_of_rows() const { return most_rows_; }
    int64_t most_of_columns() const { return most_columns_; }

    // Fills the tables, 0 behind the counts. full: rows below whole_rows and columns below
    // whole_columns that causality does not meet.
    void write(uintptr_t counts, uintptr_t indices, uintptr_t full, uintptr_t column_counts,
               uintptr_t column_indices, uintptr_t column_full, int64_t whole_rows,
               int64_t whole_columns) const {
        const py::gil_scoped_release released;
        const Tables by_row = tables_at(counts, indices, full),
                     by_column = tables_at(column_counts, column_indices, column_full);
        const size_t lines = static_cast<size_t>(heads_ * columns_ * most_columns_);
        std::memset(by_column.indices, 0, lines * sizeof(int32_t));
        std::memset(by_column.full, 0, lines);
        std::memset(by_column.counts, 0, column_counts_.size() * sizeof(int32_t));
        for (int64_t line = 0; line < heads_ * rows_; ++line) {
            const int64_t row = line % rows_, head = line / rows_;
            const int32_t* const list = visited_.data() + starts_[static_cast<size_t>(line)];
            const int64_t n =
                starts_[static_cast<size_t>(line) + 1] - starts_[static_cast<size_t>(line)];
            by_row.counts[line] = static_cast<int32_t>(n);
            int32_t* const out = by_row.indices + line * most_rows_;
            bool* const whole = by_row.full + line * most_rows_;
            for (int64_t k = 0; k < n; ++k) {
                const int64_t column = list[k], at = head * columns_ + column;
                const bool all =
                    row < whole_rows && column < whole_columns && (!causal_ || column < row);
                out[k] = list[k];
                whole[k] = all;
                const int64_t place = at * most_columns_ + by_column.counts[at]++;
                by_column.indices[place] = static_cast<int32_t>(row);
                by_column.full[place] = all;
            }
            std::fill(out + n, out + most_rows_, 0);
            std::fill(whole + n, whole + most_rows_, false);
        }
    }

private:
    void find(const std::vector<Rectangle>& ordered, const std::vector<int64_t>& starts,
              int64_t strips) {
        Strip strip(columns_);
        std::vector<Rectangle> reaching;
        starts_.reserve(static_cast<size_t>(heads_ * rows_ + 1));
        starts_.push_back(0);
        for (int64_t part = 0; part < heads_ * strips; ++part) {
            const int64_t begin = part % strips * STRIP, end = std::min(rows_, begin + STRIP);
            if (begin == 0) reaching.clear();
            reaching.erase(std::remove_if(reaching.begin(), reaching.end(),
                                          [=](const Rectangle& r) { return r.row_end <= begin; }),
                           reaching.end());
            const auto at = [&](int64_t n) {
                return ordered.begin() + starts[static_cast<size_t>(n)];
            };
            reaching.insert(reaching.end(), at(part), at(part + 1));
            for (const Rectangle& r : reaching)
                for (int64_t row = std::max(begin, r.row); row < std::min(end, r.row_end); ++row)
                    strip.paint(row - begin, r.column,
                                causal_ ? std::min(r.column_end, row + 1) : r.column_end);
            int32_t* const counts = column_counts_.data() + part / strips * columns_;
            for (int64_t row = begin; row < end; ++row) {
                strip.take(row - begin, [&](int32_t column) {
                    visited_.push_back(column);
                    ++counts[column];
                });
                const int64_t total = static_cast<int64_t>(visited_.size());
                most_rows_ = std::max(most_rows_, total - starts_.back());
                starts_.push_back(total);
            }
        }
        for (const int32_t n : column_counts_)
            most_columns_ = std::max(most_columns_, static_cast<int64_t>(n));
    }

    int64_t heads_, rows_, columns_;
    bool causal_;
    std::vector<int32_t> visited_;  // columns, row by row
    std::vector<int64_t> starts_;   // of each row among them
    std::vector<int32_t> column_counts_;
    int64_t most_rows_ = 1, most_columns_ = 1;
};

}  // namespace

void bind_block_lists(py::module_& m) {
    py::class_<BlockLists>(m, "BlockLists",
                           "The blocks that rectangles visit, by rows and by columns.")
        .def(py::init<uintptr_t, int64_t, int64_t, int64_t, int64_t, bool>(), py::arg("rectangles"),
             py::arg("count"), py::arg("heads"), py::arg("rows"), py::arg("columns"),
             py::arg("causal"))
        .def_property_readonly("most_of_rows", &BlockLists::most_of_rows)
        .def_property_readonly("most_of_columns", &BlockLists::most_of_columns)
        .def("write", &BlockLists::write, py::arg("counts"), py::arg("indices"), py::arg("full"),
             py::arg("column_counts"), py::arg("column_indices"), py::arg("column_full"),
             py::arg("whole_rows"), py::arg("whole_columns"))
        .def_static(
            "in_huge_pages",
            [](uintptr_t memory, int64_t bytes) {
                pyops::ask_for_huge_pages(reinterpret_cast<void*>(memory), bytes, 4 << 20);
            },
            py::arg("memory"), py::arg("bytes"), "Of the memory of all tables, if it is large.");
}
