// Runs the index arithmetic of the CUDA kernels on the host, every CTA and thread in turn, and
// counts visits. Prints "ok <elements>" or the first element that was not visited exactly once, or
// not in line, and returns 1.
#include "../../csrc/cuda/partition.cuh"

#include <cstdio>
#include <cstdlib>
#include <vector>

using namespace pyops::cuda;

namespace {

struct SerialVote {
    template <typename Holds>
    int operator()(const Holds& holds) const {
        int count = 0;
        for (int lane = 0; lane < LANES; ++lane) count += holds(lane);
        return count;
    }
};

struct Table {
    int64_t chunk;
    std::vector<int64_t> numel, first;
    Table(int64_t chunk_, std::vector<int64_t> numel_) : chunk(chunk_), numel(std::move(numel_)) {
        int64_t sum = 0;
        for (int64_t n : numel) {
            first.push_back(sum);
            sum += (n + chunk - 1) / chunk;
        }
        chunks = sum;
    }
    int64_t chunks = 0;
};

[[noreturn]] void fail(const char* what, int64_t row, int64_t index) {
    std::printf("%s: row %lld, element %lld\n", what, static_cast<long long>(row),
                static_cast<long long>(index));
    std::exit(1);
}

// One grid over one table: `misaligned` is how far every row lies beyond a pack boundary.
template <int N, int UNROLL>
int64_t visit(const Table& table, int misaligned, unsigned ctas, int threads) {
    const int rows = static_cast<int>(table.numel.size());
    const int head = head_of(misaligned, N);
    std::vector<std::vector<int>> visits;
    for (int64_t n : table.numel) visits.emplace_back(n);
    for (int64_t slab = 0; slab < table.chunks; slab += ctas * SPAN)
        for (unsigned cta = 0; cta < ctas; ++cta) {
            const Range span = span_of(slab, cta, ctas, table.chunks);
            for (int64_t c = span.begin; c < span.end; ++c) {
                const int row =
                    row_of([&](int r) { return table.first[r]; }, rows, c, SerialVote{});
                const int64_t index = c - table.first[row];
                if (index < 0 || index * table.chunk >= table.numel[row])
                    fail("chunk beyond its row", row, index);
                const Range range = elements_of(index, table.numel[row], table.chunk, head);
                auto& seen = visits[row];
                const auto one = [&](int64_t i) { ++seen.at(i); };
                const auto pack = [&](int64_t i) {
                    if ((i + misaligned) % N) fail("pack out of line", row, i);
                    for (int j = 0; j < N; ++j) ++seen.at(i + j);
                };
                const auto many = [&](int64_t i) {
                    for (int u = 0; u < UNROLL; ++u)
                        pack(i + static_cast<int64_t>(u) * threads * N);
                };
                const Range packs = packs_of(range, index == 0 ? head : 0, N);
                for (int thread = 0; thread < threads; ++thread) {
                    walk_packs<N, UNROLL>(packs, thread, threads, many, pack);
                    walk_edges(range, packs, thread, threads, one);
                }
            }
        }
    int64_t elements = 0;
    for (int row = 0; row < rows; ++row)
        for (size_t i = 0; i < visits[row].size(); ++i, ++elements)
            if (visits[row][i] != 1)
                fail(visits[row][i] ? "visited twice" : "never visited", row,
                     static_cast<int64_t>(i));
    return elements;
}

int64_t visit_all(const Table& table) {
    int64_t elements = 0;
    for (unsigned ctas : {1, 2, 3, 7, 64})
        for (int misaligned = 0; misaligned < 8; ++misaligned) {
            elements += visit<8, 2>(table, misaligned, ctas, 16);
            elements += visit<4, 4>(table, misaligned % 4, ctas, 8);
            elements += visit<2, 1>(table, misaligned % 2, ctas, 32);
            elements += visit<1, 2>(table, 0, ctas, 16);
        }
    return elements;
}

}  // namespace

int main() {
    int64_t elements = 0;
    for (int64_t n = 0; n <= 300; ++n)
        elements += visit_all(Table(64, {n + 1, 0, n, 0, 0, 1}));  // empty rows between
    std::vector<int64_t> many;
    for (int64_t i = 0; i < 3000; ++i) many.push_back((i * i + 3) % 131);
    many.back() = 5;
    elements += visit_all(Table(64, many));
    elements += visit_all(Table(64, {64 * 16 * 7 * 3 + 5}));  // several slabs
    char buffer[64];
    for (int at = 0; at < 16; ++at) {
        const int expected = at % 2 ? -1 : at / 2 % 8;
        const auto base = reinterpret_cast<uintptr_t>(buffer) / 16 * 16 + 16;
        if (misalignment(reinterpret_cast<void*>(base + at), 2, 8) != expected)
            fail("misalignment", 0, at);
    }
    if (shared_misalignment(3, nullptr, 4, 4) != 3 ||
        shared_misalignment(1, reinterpret_cast<void*>(8), 4, 4) != -1)
        fail("shared misalignment", 0, 0);
    std::printf("ok %lld\n", static_cast<long long>(elements));
    return 0;
}
