// The lists of attention.h, from summaries of tiles and from the block layout.
#include "attention_visits.h"

#include <algorithm>
#include <limits>

namespace pyops {
namespace {

constexpr int64_t TILE = ATTENTION_TILE;

enum Sight { NOTHING, SOME, ALL };

// What a tile of queries or keys is, as far as others can be seen from it.
struct Summary {
    int64_t first_place, last_place;
    // Of the documents but padding; first > last: padding alone
    int32_t first_document = 0, last_document = 0;
    bool padded = false;              // padding is among them
    bool masked = false, all = true;  // no key is to be seen; every one is

    bool one_document() const { return first_document == last_document && !padded; }
};

struct Side {
    int64_t n;  // tokens
    const int64_t* places;
    const int32_t* documents;  // of the row of the batch
    const uint8_t* mask;
};

Summary summary_of(const Side& side, int64_t tile) {
    const int64_t begin = tile * TILE, end = std::min(side.n, begin + TILE);
    Summary found{begin, end - 1};
    if (side.places) {
        found.first_place = *std::min_element(side.places + begin, side.places + end);
        found.last_place = *std::max_element(side.places + begin, side.places + end);
    }
    if (side.documents) {
        found.first_document = std::numeric_limits<int32_t>::max();
        found.last_document = -1;
        for (int64_t i = begin; i < end; ++i) {
            const int32_t id = side.documents[i];
            if (id < 0) {
                found.padded = true;
                continue;
            }
            found.first_document = std::min(found.first_document, id);
            found.last_document = std::max(found.last_document, id);
        }
    }
    if (side.mask) {
        const int64_t seen = std::count_if(side.mask + begin, side.mask + end,
                                           [](uint8_t byte) { return byte != 0; });
        found.masked = seen == 0;
        found.all = seen == end - begin;
    }
    return found;
}

Sight sight_of(const AttentionSpan& span, const Summary& query, const Summary& key) {
    if (key.masked) return NOTHING;
    bool all = key.all;
    if (span.causal) {
        if (key.first_place > query.last_place) return NOTHING;
        all &= key.last_place <= query.first_place;
    }
    if (span.before >= 0) {
        if (key.last_place < query.first_place - span.before) return NOTHING;
        all &= key.first_place >= query.last_place - span.before;
    }
    if (span.after >= 0) {
        if (key.first_place > query.last_place + span.after) return NOTHING;
        all &= key.last_place <= query.first_place + span.after;
    }
    if (span.query_documents) {
        if (std::max(query.first_document, key.first_document) >
            std::min(query.last_document, key.last_document))
            return NOTHING;
        all &= query.one_document() && key.one_document() &&
               query.first_document == key.first_document;
    }
    return all ? ALL : SOME;
}

// For a tile of queries: how many pairs of each tile of keys the layout lists, and which tiles have
// any, ascending.
struct Listed {
    std::vector<int64_t> pairs;
    std::vector<int64_t> tiles;

    explicit Listed(int64_t key_tiles) : pairs(static_cast<size_t>(key_tiles), 0) {}
    void find(const AttentionSpan& span, int64_t h, int64_t tile) {
        for (const int64_t k : tiles) pairs[static_cast<size_t>(k)] = 0;
        tiles.clear();
        const int64_t begin = tile * TILE, end = std::min(span.T, begin + TILE);
        for (int64_t row = begin / span.block; row * span.block < end; ++row) {
            const int64_t queries =
                std::min(end, (row + 1) * span.block) - std::max(begin, row * span.block);
            const int64_t list = (span.layout_heads > 1 ? h : 0) * span.query_blocks + row;
            for (int64_t n = 0; n < span.row_counts[list]; ++n)
                add(span, span.row_indices[list * span.most + n], queries);
        }
        std::sort(tiles.begin(), tiles.end());
    }

private:
    void add(const AttentionSpan& span, int64_t block, int64_t queries) {
        const int64_t stop = std::min(span.S, (block + 1) * span.block);
        for (int64_t begin = block * span.block; begin < stop;) {
            const int64_t k = begin / TILE, end = std::min(stop, (k + 1) * TILE);
            int64_t& so_far = pairs[static_cast<size_t>(k)];
            if (so_far == 0) tiles.push_back(k);
            so_far += queries * (end - begin);
            begin = end;
        }
    }
};

}  // namespace

Visits::Visits(const AttentionSpan& span, bool columns)
    : batches_(span.mask || span.query_documents ? span.B : 1),
      heads_(span.block && span.layout_heads > 1 ? span.H : 1),
      query_tiles_((span.T + TILE - 1) / TILE), key_tiles_((span.S + TILE - 1) / TILE) {
    std::vector<Summary> keys(static_cast<size_t>(key_tiles_));
    Listed listed(key_tiles_);
    if (!span.block)
        for (int64_t k = 0; k < key_tiles_; ++k) listed.tiles.push_back(k);
    row_starts_.push_back(0);
    for (int64_t b = 0; b < batches_; ++b) {
        const Side query_side{span.T, span.query_places,
                              span.query_documents ? span.query_documents + b * span.T : nullptr,
                              nullptr};
        const Side key_side{span.S, span.key_places,
                            span.key_documents ? span.key_documents + b * span.S : nullptr,
                            span.mask ? span.mask + b * span.S : nullptr};
        for (int64_t k = 0; k < key_tiles_; ++k)
            keys[static_cast<size_t>(k)] = summary_of(key_side, k);
        for (int64_t h = 0; h < heads_; ++h)
            for (int64_t i = 0; i < query_tiles_; ++i) {
                const Summary query = summary_of(query_side, i);
                if (span.block) listed.find(span, h, i);
                const int64_t queries = std::min(TILE, span.T - i * TILE);
                int32_t ordinal = 0;
                for (const int64_t k : listed.tiles) {
                    const Sight sight = sight_of(span, query, keys[static_cast<size_t>(k)]);
                    if (sight == NOTHING) continue;
                    const int64_t count = std::min(TILE, span.S - k * TILE);
                    const bool full =
                        sight == ALL && count == TILE &&
                        (!span.block || listed.pairs[static_cast<size_t>(k)] == queries * count);
                    rows_.push_back({static_cast<int32_t>(k), ordinal++, full});
                }
                row_starts_.push_back(static_cast<int64_t>(rows_.size()));
            }
    }
    if (columns) turn();
}

// The same visits by tiles of keys.
void Visits::turn() {
    const int64_t parts = batches_ * heads_;
    column_starts_.assign(static_cast<size_t>(parts * key_tiles_ + 1), 0);
    columns_.resize(rows_.size());
    const auto each = [&](auto f) {
        for (int64_t part = 0; part < parts; ++part)
            for (int64_t i = 0; i < query_tiles_; ++i) {
                const size_t row = static_cast<size_t>(part * query_tiles_ + i);
                for (int64_t n = row_starts_[row]; n < row_starts_[row + 1]; ++n) {
                    const Visit& visit = rows_[static_cast<size_t>(n)];
                    f(static_cast<size_t>(part * key_tiles_ + visit.tile), i, visit);
                }
            }
    };
    each([&](size_t column, int64_t, const Visit&) { ++column_starts_[column + 1]; });
    for (size_t c = 1; c < column_starts_.size(); ++c) column_starts_[c] += column_starts_[c - 1];
    std::vector<int64_t> next(column_starts_.begin(), column_starts_.end() - 1);
    each([&](size_t column, int64_t i, const Visit& visit) {
        columns_[static_cast<size_t>(next[column]++)] = {static_cast<int32_t>(i), visit.ordinal,
                                                         visit.full};
    });
}

VisitLists Visits::lists(const std::vector<Visit>& visits, const std::vector<int64_t>& starts,
                         int64_t tiles) const {
    return {visits.data(), starts.data(), batches_ > 1 ? heads_ : 0, heads_ > 1 ? 1 : 0, tiles};
}

}  // namespace pyops
