// What the experiments of docs/findings.md share. They are for D = 32 and for locations in float32.
//
// Of msda::Arguments they use some numbers in their own way: tiles_x is the points a level, tiles_y the first level that
// is staged, max_cells the cells that are staged, S the cells of an image in the layout at hand.

#pragma once

#include "gradients.cuh"

namespace findings {

using msda::Arguments;
using msda::int64;

constexpr int kD = msda::kRow;

struct Map {
    int H, W;    // without padding
    int start;   // its first cell
    int stride;  // cells a row
};

// kPadded: each map has a border of one cell all around. Every thread takes part; the caller synchronises.
template <bool kPadded>
__device__ __forceinline__ void load_maps(const Arguments& args, Map* maps) {
    const int border = kPadded ? 2 : 0, level = threadIdx.x;
    if (level < args.num_levels) {
        int start = 0;
        for (int l = 0; l < level; ++l) start += (args.sizes[2 * l] + border) * (args.sizes[2 * l + 1] + border);
        const int H = args.sizes[2 * level], W = args.sizes[2 * level + 1];
        maps[level] = Map{H, W, start, W + border};
    }
}

struct Point {
    bool inside;
    int x0, y0;
    float fx, fy, weight;
};

// `row`: of (N, Lq, M)
template <typename TWeight>
__device__ __forceinline__ Point load_point(const Arguments& args, int64 row, int j, int num_points, const Map& map) {
    const int64 index = row * num_points + j;
    const float2 location = __ldg(static_cast<const float2*>(args.locations) + index);
    const float x = fmaf(location.x, map.W, -0.5f), y = fmaf(location.y, map.H, -0.5f);
    Point point;
    // false for NaN, so no such coordinate reaches the conversion to int
    point.inside = x > -1.f && x < map.W && y > -1.f && y < map.H;
    const float x_floor = floorf(x), y_floor = floorf(y);
    point.x0 = point.inside ? static_cast<int>(x_floor) : 0;
    point.y0 = point.inside ? static_cast<int>(y_floor) : 0;
    point.fx = x - x_floor;
    point.fy = y - y_floor;
    point.weight = msda::to_float(static_cast<const TWeight*>(args.weights)[index]);
    return point;
}

struct Corner {
    bool valid;
    int cell;
    float weight;
};

template <bool kPadded>
__device__ __forceinline__ Corner corner_of(const Point& point, const Map& map, int dx, int dy) {
    const int x = point.x0 + dx, y = point.y0 + dy;
    Corner corner;
    corner.weight = point.weight * (dx ? point.fx : 1.f - point.fx) * (dy ? point.fy : 1.f - point.fy);
    if constexpr (kPadded) {
        // the border is part of the map: there is nothing to ask
        corner.valid = true;
        corner.cell = map.start + (y + 1) * map.stride + x + 1;
    } else {
        corner.valid = x >= 0 && x < map.W && y >= 0 && y < map.H;
        corner.cell = map.start + y * map.stride + x;
    }
    return corner;
}

// Elements before a cell's row: of (N, M, S, D) if kHeadMajor, where a row's right neighbour follows it, else (N, S, M, D).
template <bool kHeadMajor>
__device__ __forceinline__ int64 row_offset(const Arguments& args, int n, int m, int cell) {
    const int64 row = kHeadMajor ? (static_cast<int64>(n) * args.M + m) * args.S + cell
                                 : (static_cast<int64>(n) * args.S + cell) * args.M + m;
    return row * kD;
}

}  // namespace findings
