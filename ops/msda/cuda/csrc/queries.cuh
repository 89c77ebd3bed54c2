// Which queries a block takes: a chunk of them in order, or one tile of the maps.
//
// An encoder's queries are the cells of all levels in order, so a tile's queries, from every level, look at the same
// places: their rows meet in the L1, and their gradients in shared memory. Where queries are something else the tiles
// only lose that, never the result.

#pragma once

#include "common.cuh"

namespace msda {

struct Span {
    int x, y, width, height;  // of the tile's rectangle on a level
    int first;                // queries of the tile before it
};

struct QuerySet {
    int begin, count;
    Span spans[kMaxLevels];

    // the query of a place in the set
    __device__ __forceinline__ int query(const Arguments& args, const Level* levels, int index) const {
        if (args.tiles_x == 0) return begin + index;
        int l = 0;
        while (l + 1 < args.num_levels && index >= spans[l + 1].first) ++l;
        const Span span = spans[l];
        const int inside = index - span.first, row = inside / span.width;
        return levels[l].start + (span.y + row) * levels[l].W + span.x + inside - row * span.width;
    }
};

// every thread of the block takes part
__device__ __forceinline__ void make_query_set(const Arguments& args, const Level* levels, int chunk, QuerySet& set) {
    if (args.tiles_x == 0) {
        if (threadIdx.x == 0) {
            set.begin = chunk * args.chunk;
            set.count = min(args.chunk, args.Lq - set.begin);
        }
        __syncthreads();
        return;
    }
    const int l = threadIdx.x;
    if (l < args.num_levels) {
        const int ty = chunk / args.tiles_x, tx = chunk - ty * args.tiles_x;
        const int x = levels[l].W * tx / args.tiles_x, y = levels[l].H * ty / args.tiles_y;
        const int width = levels[l].W * (tx + 1) / args.tiles_x - x;
        const int height = levels[l].H * (ty + 1) / args.tiles_y - y;
        set.spans[l] = Span{x, y, width, height, 0};
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int count = 0;
        for (int level = 0; level < args.num_levels; ++level) {
            set.spans[level].first = count;
            count += set.spans[level].width * set.spans[level].height;
        }
        set.begin = 0;
        set.count = count;
    }
    __syncthreads();
}

// the queries of a block, listed once: the place of one in a tile takes a division
struct QueryList {
    const int* queries;
    int count;

    __device__ __forceinline__ int operator[](int index) const { return queries[index]; }
};

// every thread of the block takes part; the caller synchronises. `space`: an int a query
__device__ __forceinline__ QueryList list_queries(
    const Arguments& args, const Level* levels, const QuerySet& set, int* space
) {
    for (int i = threadIdx.x; i < set.count; i += blockDim.x) space[i] = set.query(args, levels, i);
    return QueryList{space, set.count};
}

// The queries of tiles `begin` to `end`, tile by tile, every other row of tiles backwards, so that neighbours in the
// list are neighbours on the maps. Every thread of the block takes part. `space`: `args.max_cells` queries, then a
// number a tile and one more, then a span a tile and level.
__device__ __forceinline__ QueryList list_tiles(
    const Arguments& args, const Level* levels, int begin, int end, int* space
) {
    const int num_tiles = end - begin, L = args.num_levels;
    int* queries = space;
    int* offsets = space + args.max_cells;
    Span* spans = reinterpret_cast<Span*>(offsets + args.chunk + 1);
    for (int i = threadIdx.x; i < num_tiles; i += blockDim.x) {
        const int tile = begin + i, ty = tile / args.tiles_x, along = tile - ty * args.tiles_x;
        const int tx = ty & 1 ? args.tiles_x - 1 - along : along;
        int count = 0;
        for (int l = 0; l < L; ++l) {
            const int x = levels[l].W * tx / args.tiles_x, y = levels[l].H * ty / args.tiles_y;
            const int width = levels[l].W * (tx + 1) / args.tiles_x - x;
            const int height = levels[l].H * (ty + 1) / args.tiles_y - y;
            spans[i * L + l] = Span{x, y, width, height, count};
            count += width * height;
        }
        offsets[i + 1] = count;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        offsets[0] = 0;
        for (int i = 0; i < num_tiles; ++i) offsets[i + 1] += offsets[i];
    }
    __syncthreads();
    // a warp a tile
    for (int i = threadIdx.x / 32; i < num_tiles; i += blockDim.x / 32) {
        const int count = offsets[i + 1] - offsets[i];
        for (int k = threadIdx.x % 32; k < count; k += 32) {
            int l = 0;
            while (l + 1 < L && k >= spans[i * L + l + 1].first) ++l;
            const Span span = spans[i * L + l];
            const int inside = k - span.first, row = inside / span.width;
            queries[offsets[i] + k] =
                levels[l].start + (span.y + row) * levels[l].W + span.x + inside - row * span.width;
        }
    }
    __syncthreads();
    return QueryList{queries, offsets[num_tiles]};
}

}  // namespace msda
