// What the kernels of attention are told. csrc/cpu/attention/attention.cpp fills it.
//
//   queries in tiles of 64  x  keys in tiles of 64:    visits: which tiles see each other
//
//        keys 0 1 2 3                                  by query tile, ascending:  0: 0  1: 0 1  ...
//   query 0   P . . .     P  some pairs see            by key tile, ascending:    0: 0 1  1: 1 ...
//   tile  1   F P . .     F  all pairs see             ordinal: how many visits of its query tile
//         2   . F P .     .  none: no visit                     come before this one
#pragma once
#include <cstdint>

#include "../../math/attention/attention.h"

namespace pyops {

constexpr int64_t ATTENTION_TILE = 64;

struct Visit {
    int32_t tile;     // of keys for a query tile, of queries for a key tile
    int32_t ordinal;  // among the visits of its query tile
    bool full;
};

// Visits of a tile: visits[starts[n]] to visits[starts[n + 1]], n = (b b_stride + h h_stride) tiles
// + tile; a stride is 0 where they are the same for all.
struct VisitLists {
    const Visit* visits;
    const int64_t* starts;
    int64_t b_stride, h_stride, tiles;
};

// [B, n, heads, K] in memory, the last dimension without gaps; strides in elements.
struct AttentionTensor {
    const void* data;
    int64_t batch, row, head;
};

// W: double where the dtype is float64, else float.
struct AttentionSpan {
    AttentionTensor q, k, v;
    int64_t B, T, S, H, G, K;
    int dtype;
    double scale, soft_cap;  // soft_cap 0: none
    VisitLists rows, columns;

    // What is seen
    bool causal;
    int64_t before, after;  // places; -1: all
    const uint8_t* mask;    // [B, S] or null
    const int32_t *query_documents, *key_documents;
    const int64_t *query_places, *key_places;  // null: 0, 1, 2, ...
    int64_t block;                             // of the layout; 0: none
    const int32_t *row_counts, *row_indices;   // [heads, query blocks], [.., most]
    int64_t layout_heads, query_blocks, most;

    // What is added
    const void* bias;
    int64_t bias_stride[4];  // the last is 0 or 1
    int bias_dtype;
    // W [H, 2 reach + 2 TILE + 1]: the bias of each distance, from -reach - TILE on; or null
    const void* by_distance;
    int64_t reach;
    const void* slopes;  // W [H] or null

    // What is dropped
    bool drops;
    float p;
    double keep_scale;  // 1 / (1 - p)
    uint64_t key;
    WeightCounters counters;

    // Results: y of the dtype [B, T, H, K], lse W [B, H, T]
    void *y, *lse;
    int64_t query_block;  // queries of one piece of work, a multiple of TILE
};

struct AttentionGradient {
    AttentionTensor dy;
    const void *y, *delta;  // delta W [B, H, T]: sum of dy y, less the gradient of lse
    void *dq, *dk, *dv;     // dq W [B, T, H, K], zero at first; dk, dv of the dtype [B, S, G, K]
    int32_t* turns;         // [B, H, query tiles]: visits done, zero at first
    // Contiguous, of the bias's shape, or null. Where rows, heads or queries share a number of it:
    // W, zero at first; else of `dbias_dtype`, and a number is stored once, zero where none is.
    void* dbias;
    int64_t dbias_sizes[3];
    int dbias_dtype;
    bool dbias_shared;
    double* dtable;  // [B, key tiles, H, buckets], zero at first; or null
    const int32_t* buckets;
    int64_t num_buckets;
};

}  // namespace pyops
